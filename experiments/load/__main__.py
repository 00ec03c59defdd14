"""`python -m outrider.experiments.load`."""

from outrider.experiments.load.command import main
from outrider.experiments.shared.command import run_command

run_command("load", main)
