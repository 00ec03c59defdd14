"""Holds the project's measuring scripts and their results. It is never installed."""
