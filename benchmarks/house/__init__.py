"""`make house`: how the code reads, measured: rooms, imports, sizes, docstrings, one request's way, words of the docs."""
