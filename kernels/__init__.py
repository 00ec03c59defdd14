"""Outrider: verification and signal kernels, a plain reference beside each fast one."""
