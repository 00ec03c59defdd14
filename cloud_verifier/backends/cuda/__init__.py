"""The decoder for CUDA: few kernels a layer over inputs that stay in place, so that a step is replayed as a graph.

Imports `backends`, `kv`, `kernels`; what runs without Triton and CUDA is tested so.
"""
