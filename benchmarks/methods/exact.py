"""Counts the exact methods by running the tests that prove it: `tests/exactness`, slow part included."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.results_file import ROOT
from outrider.common.types import Method
from outrider.experiments.shared.results import Measure, at_least, judged


def ask_tests(*, is_quick: bool) -> tuple[Measure, dict[str, Any]]:
    """Returns how many exact methods pass every test that names them.

    None of them counts where a test fails that names no method: a control that was not detected, an oracle.
    """
    results = _run_tests(is_quick)
    exact = [str(method) for method in Method if method.is_exact]
    failed = sorted(name for name, is_passed in results.items() if not is_passed)
    are_controls_right = all(_names(name, exact) for name in failed)
    passed = [
        method
        for method in exact
        if are_controls_right
        and any(_names(name, [method]) for name in results)
        and not any(_names(name, [method]) for name in failed)
    ]
    names = ", ".join(passed) or "none"
    measure = judged(
        "methods.exact",
        f"exact methods that pass enumeration and statistics, controls detected: {names}",
        len(passed),
        "methods",
        at_least(len(exact)),
    )
    return measure, {"num_tests": len(results), "failed": failed}


def _run_tests(is_quick: bool) -> dict[str, bool]:
    marks = () if is_quick else ("-m", "slow or not slow", "--timeout", "1800")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/exactness", *marks, f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    return {
        f"{case.get('classname')}::{case.get('name')}": not any(
            child.tag in ("failure", "error") for child in case
        )
        for case in cases
    }


def _names(test: str, methods: Collection[str]) -> bool:
    return not set(test.partition("[")[2].rstrip("]").split("-")).isdisjoint(methods)
