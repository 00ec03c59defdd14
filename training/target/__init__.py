"""Training of the embedded target. Not installed."""
