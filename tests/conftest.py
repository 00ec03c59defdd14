"""For all tests: one thread a process that computes, kernels compiled beforehand, what was measured at the end."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Generator, Iterator

import pytest
from support.notes import Note

# Before torch is imported, here and in every process that a test starts. The models are too small for a
# second thread to help, and threads that wait for each other burn whole cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the kernels before there are workers: it takes longer than a server in a test may take to start."""
    if not hasattr(session.config, "workerinput"):
        import outrider.kernels.host.rows  # noqa: F401 - compiles as it is imported


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what is imported and collected, some 800,000 objects, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the file whose tests take longest first: at the end one worker would run it while the others have ended."""
    items.sort(key=lambda item: item.path.name != "test_triton_kernels.py")


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries would report at the end what is left of them


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Puts logging back: a command that a test runs in this process sets it up for itself."""
    root, ours = logging.getLogger(), logging.getLogger("outrider")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


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
