"""For all tests: one thread a process that computes, turns where several workers share the machine, and what
was measured at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from support.notes import Note
from support.turns import turn

# Before torch is imported, here and in every process that a test starts. The models are too small for a
# second thread to help, and threads that wait for each other burn whole cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside pytest-timeout's: to wait is not to hang
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not hasattr(item.config, "workerinput"):  # nobody beside
        return (yield)
    room = Path(item.config.option.basetemp).parent  # of all workers
    with turn(room, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Keeps a line about what a test measured for the end of the run, whichever worker ran it."""
    return lambda line: record_property("note", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
    kept = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    lines = [value for name, value in kept if name == "note"]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write("\n".join((*lines, "")))
