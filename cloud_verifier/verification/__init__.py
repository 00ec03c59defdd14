"""From logits to a verdict: processed rows, methods, log-probabilities. Imports `kernels` and `common`."""
