"""Helpers that several experiments use: processes, prompts, decoding, results files."""
