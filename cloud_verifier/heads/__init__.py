"""Draft sources at the verifier: heads trained on the target's own states."""
