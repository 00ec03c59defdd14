"""Holds what the engine's cases share: the recording, pinned processes, the generator, turns."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from outrider.experiments.load.record import record_embedded, synthetic_recording
from outrider.experiments.load.recording import Recording
from outrider.experiments.load.report import LoadReport
from outrider.experiments.shared.processes import VerifierProcess, running_verifier
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic

QUIET = ("--log-level", "error")
NUM_THREADS = os.cpu_count() or 1


@dataclass
class Bench:
    """Holds what the cases share. `is_quick` shortens all to a smoke test, files are written to `scratch`,
    `stack` ends what was started."""

    scratch: Path
    is_quick: bool
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def pick(self, full: Any, quick: Any) -> Any:
        """Returns `quick` in a smoke test, else `full`."""
        return quick if self.is_quick else full

    @cached_property
    def recording(self) -> Recording:
        """Records real rounds of the embedded pair once a run, each session alone."""
        return record_embedded(
            self.verifier.address, num_sessions=self.pick(32, 16), num_rounds=self.pick(24, 8)
        )

    @cached_property
    def verifier(self) -> VerifierProcess:
        """Starts the embedded target as served, for every case that needs no flags of its own."""
        flags = (*QUIET, "--num-threads", str(NUM_THREADS))
        return self.stack.enter_context(running_verifier(*flags))

    @cached_property
    def recording_file(self) -> Path:
        """Writes `recording` for the load generator."""
        return self.recording.save(self.scratch / "recording.jsonl")

    @cached_property
    def stub_file(self) -> Path:
        """Writes a recording of the synthetic target for the load generator."""
        return synthetic_recording(32, 48).save(self.scratch / "stub.jsonl")

    def say(self, text: str) -> None:
        """Prints a line of progress."""
        print(f"  {text}", flush=True)


@contextlib.contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """Runs processes started inside on these cores only; anywhere where none is given or here."""
    before = os.sched_getaffinity(0)
    wanted = set(cores) & before
    os.sched_setaffinity(0, wanted or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def running_stub() -> contextlib.AbstractContextManager[VerifierProcess]:
    """Runs a synthetic target whose forward costs nothing: what is left is everything but the model."""
    return running_synthetic(SyntheticPair())


def generate_load(address: str, recording: Path, *flags: str, core: int | None = None) -> LoadReport:
    """Runs the load generator in a process of its own. Raises RuntimeError where it fails."""
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
    return LoadReport.from_json(json.loads(done.stdout))
