"""Verification methods, one file each, listed in `registry`. They import `common` alone."""
