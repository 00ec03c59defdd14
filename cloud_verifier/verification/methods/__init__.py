"""Verification methods behind one registry: a new method is a new file."""
