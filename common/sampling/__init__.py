"""Logit processing, truncation and draft supports for both sides, over numpy or torch arrays."""
