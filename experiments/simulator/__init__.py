"""Whole systems in virtual time: the product's own edges and verifiers, with time, network, models played."""
