"""Chooses draft length, window and execution mode from measured costs and acceptance.

Imports `core` and `drafting`.
"""
