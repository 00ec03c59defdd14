"""For all tests: one thread a process that computes, kernels compiled beforehand, what was measured at the end."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from support.notes import Note

# Before torch is imported, here and in every process that a test starts. The models are too small for a
# second thread to help, and threads that wait for each other burn whole cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the kernels before there are workers: it takes 10 s, longer than servers in tests may take to start."""
    if not hasattr(session.config, "workerinput"):
        import outrider.kernels.host  # noqa: F401 - compiles as it is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the file whose tests take longest first: at the end one worker would run it while the others have ended."""
    items.sort(key=lambda item: item.path.name != "test_triton_kernels.py")


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
