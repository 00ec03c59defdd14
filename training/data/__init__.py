"""Corpus, tokenizer and token streams. Imports nothing else of `training`."""
