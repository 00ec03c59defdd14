"""The target model behind one small protocol (`backends.base`).

Imports `kv`, `verification.row_kernels`, `common`.
"""
