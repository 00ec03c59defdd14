"""What the engine's cases share: the recording, pinned processes, the generator, turns."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.engine.recorded_drafts import record_embedded
from outrider.experiments.load.recording import Recording
from outrider.experiments.load.report import LoadReport
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.shared.results import Measure
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.recording import synthetic_recording
from outrider.experiments.synthetic.serve import running_synthetic

QUIET = ("--log-level", "error")
NUM_THREADS = os.cpu_count() or 1


@dataclass
class Found:
    """What one case gives: measures for the table, figures behind them."""

    measures: list[Measure]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """`is_quick` shortens all to a smoke test; files lie in `scratch`, `stack` ends what was started."""

    scratch: Path
    is_quick: bool
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.is_quick else full

    @cached_property
    def recording(self) -> Recording:
        """Real rounds of the embedded pair, each session recorded alone; made once a run."""
        return record_embedded(
            self.verifier.address, num_sessions=self.pick(32, 16), num_rounds=self.pick(24, 8)
        )

    @cached_property
    def verifier(self) -> VerifierProcess:
        """The embedded target as served, for every case that needs no flags of its own."""
        flags = (*QUIET, "--num-threads", str(NUM_THREADS))
        return self.stack.enter_context(running_verifier(*flags))

    @cached_property
    def recording_file(self) -> Path:
        return self.recording.save(self.scratch / "recording.jsonl")

    @cached_property
    def stub_file(self) -> Path:
        return synthetic_recording(32, 48).save(self.scratch / "stub.jsonl")

    def say(self, text: str) -> None:
        print(f"  {text}", flush=True)


@contextlib.contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Processes started inside run on these cores only (none given, or too few here: anywhere)."""
    before = os.sched_getaffinity(0)
    wanted = set(cores) & before
    os.sched_setaffinity(0, wanted or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def running_stub() -> contextlib.AbstractContextManager[VerifierProcess]:
    """A synthetic target whose forward costs nothing: what is left is everything but the model."""
    return running_synthetic(SyntheticPair())


def generate_load(address: str, recording: Path, *flags: str, core: int | None = None) -> LoadReport:
    """`python -m outrider.experiments.load` in a process of its own. Raises RuntimeError with its words."""
    command = [
        sys.executable,
        "-m",
        "outrider.experiments.load",
        "--address",
        address,
        "--recording",
        str(recording),
    ]
    with pinned(*([] if core is None else [core])):
        done = subprocess.run(
            [*command, *flags, "--json"], stdout=subprocess.PIPE, text=True, timeout=300, check=False
        )
    if done.returncode > 1 or not done.stdout:
        raise RuntimeError(f"the load generator failed ({done.returncode}): {' '.join(flags)}")
    return LoadReport(**json.loads(done.stdout))


def alternate(
    timed: dict[str, Callable[[], float]], num_turns: int, on_turn: Callable[[int], None] = lambda turn: None
) -> dict[str, list[float]]:
    """Seconds of each, one after the other in every turn, after one turn to warm up."""
    for run in timed.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(num_turns):
        on_turn(turn)
        for name, run in timed.items():
            seconds[name].append(run())
    return seconds


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    return statistics.median(u / low for u, low in zip(upper, lower, strict=True))


def time_s(run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s
