"""Data types of one generation for every room of the edge: options, events, statistics. Imports `common` alone."""
