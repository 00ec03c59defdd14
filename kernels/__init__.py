"""Kernels over rows of logits: a reference, numba for CPUs, Triton for CUDA. Imports none of our packages."""
