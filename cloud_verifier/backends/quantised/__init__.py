"""Targets with quantised weights: which are served and how they are named, and bitsandbytes' matrices of 4 bits.

May import `common` and, inside functions, torch, transformers and bitsandbytes.
"""
