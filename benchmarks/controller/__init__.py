"""`make bench-controller`: depth policies, windows, modes, gates and outages."""
