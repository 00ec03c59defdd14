"""Data types of one generation that every room of the edge uses: options, events, statistics. Imports `common` alone."""
