"""Kernels for a CPU, compiled by numba: those of a decoder's layers, and in `rows` those of rows of logits."""
