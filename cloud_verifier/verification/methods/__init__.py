"""Verification methods, one file each, named in `registry`. Imports `common`, and of `verification` nothing."""
