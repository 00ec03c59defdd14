"""A head that learns at the edge from the target's log-probabilities, and its files. Imports numpy, `common` and what a
draft is; nothing of sessions."""
