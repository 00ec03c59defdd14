"""Distillation of a draft from a target. Imports `data` and `common`."""
