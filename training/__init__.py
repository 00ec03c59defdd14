"""Recipes that make the embedded pair and distil drafts; see training/README.md."""
