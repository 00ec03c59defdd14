"""`make bench-methods`: acceptance, exactness and cost of the verification methods."""
