"""Experiments: benchmarks, link emulation, sweeps."""
