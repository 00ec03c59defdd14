"""The realisation inside the kernel: `tc netem`."""
