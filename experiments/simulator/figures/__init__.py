"""Figures of a simulated system and its results folder."""
