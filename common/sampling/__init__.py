"""Logit processing, truncation and draft supports: one implementation for both sides, over numpy or torch arrays."""
