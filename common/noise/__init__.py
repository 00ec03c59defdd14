"""Counter-based randomness: the same draw for the same key on both sides.

Imports numpy and `common.errors`.
"""
