"""Tokenizer and chat template of the edge. Imports `common` alone."""
