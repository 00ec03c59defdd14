"""Simulated parts: network, drafts, targets, edges, verifiers, times."""
