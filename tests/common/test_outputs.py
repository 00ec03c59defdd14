"""Commands whose output is closed or full."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = pytest.mark.parametrize(
    ("package", "command"), [("edge_client", "edge-client"), ("cloud_verifier", "cloud-verifier")]
)


def show(package: str, redirections: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"outrider.{package}", "config", "show"]
    shell = ["sh", "-c", f'"$@" {redirections}', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=60)


@COMMANDS
def test_an_output_that_is_full_is_told_in_a_line(package: str, command: str) -> None:
    found = show(package, ">/dev/full")
    assert found.returncode == 1
    assert found.stderr == f"{command}: cannot write the output: No space left on device\n"


@COMMANDS
def test_an_output_that_is_closed_takes_everything(package: str, command: str) -> None:
    assert show(package, ">&- 2>&-").returncode == 0
