"""What torch's OpenMP runtime reads once is said before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("set_before", "found"), [(None, "20000"), ("7", "7")])
def test_the_command_says_how_long_threads_spin(set_before: str | None, found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if set_before is not None:
        environment["GOMP_SPINCOUNT"] = set_before
    program = (
        "import os, sys, outrider.cloud_verifier.server.cli\n"
        "print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert told.stdout.split() == [found, "False"], told.stderr
