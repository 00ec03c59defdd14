"""Runs `python -m outrider.training.heads`."""

from outrider.training.heads.command import main

main()
