"""From logits to a verdict: rows, methods, log-probabilities. Imports `kernels` and `common`."""
