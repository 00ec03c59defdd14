"""Grammars that a text obeys, as a mask over scores that both sides compute from the text alone.

Imports numpy and the rest of `common`; llguidance (extra `structured`) is loaded by `Vocabulary.open` and nowhere else.
"""
