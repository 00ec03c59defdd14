"""`make bench-controller`: depth policies, windows and modes."""
