"""Attention over the paged pool: what a forward's layers share, and the ways to compute it. Imports no decoder."""
