"""Draft length, window and execution mode, chosen from measured costs and acceptance. Imports `core`, `drafting`."""
