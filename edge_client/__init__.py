"""Outrider: the edge. Drafts with INT4 weights, sends rounds, keeps its KV aligned. Never imports torch."""
