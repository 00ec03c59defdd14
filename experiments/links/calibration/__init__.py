"""Measurement of the realisations against a profile and against each other."""
