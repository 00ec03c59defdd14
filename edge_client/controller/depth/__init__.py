"""How many tokens to draft in a round: one policy a file, by name in `registry`."""
