"""`python -m outrider.experiments.simulator`."""

from __future__ import annotations

from outrider.experiments.shared.command import run_command
from outrider.experiments.simulator.command import main

if __name__ == "__main__":
    run_command("simulator", main)
