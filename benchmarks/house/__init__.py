"""`make house`: how the code reads, measured: rooms, imports, sizes, docstrings, one request, words of the docs."""
