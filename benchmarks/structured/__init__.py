"""Texts that obey schemas: whether they do, whether they are cloud-only's, and what that costs."""
