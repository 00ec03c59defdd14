"""How matrices are multiplied so that a row's bits are its own: with how many rows, and by what.

Imports `common`, `kernels.product`.
"""
