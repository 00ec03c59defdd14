"""A results folder: records, metrics, comparisons. Starts nothing."""
