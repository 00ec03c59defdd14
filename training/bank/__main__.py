"""`python -m outrider.training.bank`."""

from outrider.training.bank.command import main

main()
