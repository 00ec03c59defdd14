"""Measures of targets, drafts and pairs. Not installed."""
