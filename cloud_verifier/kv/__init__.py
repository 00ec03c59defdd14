"""Paged KV bookkeeping: pure integers, no tensors."""
