"""Drafting by a model's rows of scores: what is the same whatever computes them."""
