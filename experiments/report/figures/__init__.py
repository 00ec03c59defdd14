"""The report's figures, one a file; `registry.py` has their order."""
