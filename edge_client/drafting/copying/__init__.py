"""Drafts that copy tokens which followed the same tokens before: prompt lookup, suffix decoding, retrieval. One index,
`contexts.py`, finds them all. Imports drafting, and is imported by its registry alone."""
