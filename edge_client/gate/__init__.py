"""Which drafted tokens are doubted, and what follows: the draft ends, or what it drafted is sent."""
