"""Speed of this checkout against another commit's, in turns in one run: medians of 15 turns.

The other commit is checked out into a temporary git worktree. Both run in this interpreter's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.results_file import ROOT
from outrider.experiments.shared.results import Measure, at_least, judged

NUM_TURNS = 15
_PROMPT = "def read_lines(path):"
_Run = Callable[[], float]


class _Checkout:
    """Runs modules of one checkout. `is_old`: before everything moved below `outrider`."""

    def __init__(self, root: Path, is_old: bool) -> None:
        self.root, self._is_old = root, is_old

    def command(self, module: str, *arguments: str) -> list[str]:
        return [sys.executable, "-m", self.module(module), *arguments]

    def module(self, name: str) -> str:
        if not self._is_old:
            return name
        old = {
            "benchmarks.loop": "experiments.bench_loop",
            "benchmarks.engine.run": "experiments.bench_engine",
        }
        return old.get(name, name.removeprefix("outrider."))

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        command = self.command(module, *arguments)
        return subprocess.Popen(command, cwd=self.root, env=environment, stdout=subprocess.PIPE, text=True)

    def output(self, module: str, *arguments: str) -> str:
        """Returns what a module prints. Raises CalledProcessError where it fails."""
        process = self.start(module, *arguments)
        out, _ = process.communicate(timeout=600)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self.module(module), out)
        return out

    @contextlib.contextmanager
    def verifier(self) -> Iterator[str]:
        """Serves the embedded target and gives its address."""
        process = self.start(
            "outrider.cloud_verifier", "serve", "--listen", "127.0.0.1:0", "--admin-listen", "none"
        )
        try:
            assert process.stdout is not None
            while not (found := re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())):
                assert process.poll() is None, "the verifier did not start"
            yield found[0]
        finally:
            process.terminate()
            process.communicate(timeout=30)

    def loop_rate(self) -> float:
        """Returns rounds a second of the edge's loop alone."""
        return 1e6 / float(re.search(r"(\d+) µs", self.output("benchmarks.loop"))[1])  # type: ignore[index]

    def stub_rounds(self) -> float:
        """Returns rounds a second of a verifier whose target costs nothing."""
        out = self.output("benchmarks.engine.run", "--quick", "--only", "stub_rounds")
        return float(re.search(r"engine\.stub_rounds\s+([\d.]+)", out)[1])  # type: ignore[index]

    def main_job(self, address: str) -> float:
        """Returns tokens a second of one speculative text of the embedded pair."""
        flags = ("--verifier", address, "--seed", "7", "--max-new-tokens", "200", "--ignore-eos", "--json")
        report = json.loads(self.output("outrider.edge_client", "run", _PROMPT, *flags))
        return float(report["stats"]["tokens_per_s"])


@contextlib.contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "old"
        subprocess.run(
            ("git", "worktree", "add", "--quiet", "--detach", str(path), commit), cwd=ROOT, check=True
        )
        try:
            yield path
        finally:
            subprocess.run(("git", "worktree", "remove", "--force", str(path)), cwd=ROOT, check=True)


def _in_turns(name: str, run_old: _Run, run_new: _Run) -> Measure:
    """Runs both in turns and compares medians. The A/A ratio is that of the old one's even and odd turns."""
    old: list[float] = []
    new: list[float] = []
    for turn in range(NUM_TURNS):
        old.append(run_old())
        new.append(run_new())
        print(f"  {name} {turn + 1}/{NUM_TURNS}: {old[-1]:.1f} {new[-1]:.1f}", flush=True)
    ratio = statistics.median(new) / statistics.median(old)
    same = statistics.median(old[::2]) / statistics.median(old[1::2])
    return judged(
        f"house.same.{name}", f"{name}: this : before (A/A {same:.3f})", ratio, "ratio", at_least(0.97)
    )


def measure_same(commit: str) -> list[Measure]:
    """Returns the ratio this : `commit` of the main job, of stub rounds and of the edge's loop."""
    with _worktree(commit) as path:
        old, new = _Checkout(path, is_old=True), _Checkout(ROOT, is_old=False)
        measures = [_in_turns("loop", old.loop_rate, new.loop_rate)]
        measures.append(_in_turns("stub_rounds", old.stub_rounds, new.stub_rounds))
        with old.verifier() as before, new.verifier() as now:
            measures.append(_in_turns("main", lambda: old.main_job(before), lambda: new.main_job(now)))
        return measures
