"""`python -m outrider.training.pair`."""

from outrider.training.pair.command import main

main()
