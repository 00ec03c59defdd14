"""`make bench-pair`: the embedded pair, its draft and its target."""
