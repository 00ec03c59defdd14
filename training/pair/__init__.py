"""`python -m outrider.training.pair.__main__`: the embedded pair from corpus to card. Not installed."""
