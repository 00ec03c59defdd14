"""`edge-client doctor`: one check a file or function, each with what it found and what to do."""
