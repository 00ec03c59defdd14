"""The gate: which drafted tokens are hard, and what is done with them. Imports drafting."""
