"""`python -m outrider.training.pair`: the embedded pair from corpus to card. Not installed."""
