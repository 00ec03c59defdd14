"""Policies that choose how many tokens a round drafts: one a file, by name in `registry`."""
