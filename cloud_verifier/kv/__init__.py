"""Paged KV as pure integers: blocks, tables and the prefix cache. Imports nothing of ours."""
