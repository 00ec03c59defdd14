"""`python -m experiments.simulator`."""

from __future__ import annotations

from experiments.command import run_command
from experiments.simulator.command import main

if __name__ == "__main__":
    run_command("simulator", main)
