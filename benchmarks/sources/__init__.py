"""Measures where drafts come from: suffixes, retrieval, staged drafts, exports and their comparison."""
