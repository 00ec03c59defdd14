"""One stage's process, what it is given and what it reports: `python -m benchmarks.gpu_check.stage MODULE FILE`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.experiments.shared.results import Measure

if TYPE_CHECKING:
    import torch

Picked = TypeVar("Picked")
Target = tuple[str, Callable[[float], bool]]  # of `outrider.experiments.shared.results`
NONE: Target = "none", lambda count: count == 0


@dataclass
class Setting:
    """Says where a stage runs, and until when; a rehearsal runs on a CPU."""

    is_rehearsal: bool
    limit_s: float
    start_s: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        """Returns the device's name in torch."""
        return "cpu" if self.is_rehearsal else "cuda"

    @property
    def seconds_left(self) -> float:
        """Returns the time until the stage is cut."""
        return self.limit_s - (time.monotonic() - self.start_s)

    def pick(self, real: Picked, toy: Picked) -> Picked:
        """Returns `toy` in a rehearsal, else `real`."""
        return toy if self.is_rehearsal else real

    def dtype(self) -> torch.dtype:
        """Returns the dtype of weights: float32 in a rehearsal, where errors are to be small, else bfloat16."""
        import torch

        return self.pick(torch.bfloat16, torch.float32)

    def synchronize(self) -> None:
        """Waits for the device."""
        if not self.is_rehearsal:
            import torch

            torch.cuda.synchronize()

    def wall_ms(self, run: Callable[[], object], num_turns: int = 9) -> float:
        """Returns the median time of `run` and of what it started on the device, after two to warm up."""
        found = []
        for _ in range(self.pick(num_turns + 2, 2)):
            self.synchronize()
            start_s = time.perf_counter()
            run()
            self.synchronize()
            found.append(1e3 * (time.perf_counter() - start_s))
        return statistics.median(found[self.pick(2, 1) :])

    def device_ms(self, run: Callable[[], object], num_turns: int = 15) -> float:
        """Returns the median time on the device, whose caches hold nothing of what is timed."""
        if self.is_rehearsal:
            return self.wall_ms(run)
        import torch

        from outrider.cloud_verifier.backends.products.timing import device_ms

        return device_ms(run, torch.device(self.device), num_turns)

    def copy_gbps(self) -> float:
        """Returns the rate of a copy on the device, bytes read and written: the ceiling of what reads memory."""
        import torch

        source = torch.ones(self.pick(2**31, 2**22), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / 1e6 / self.device_ms(lambda: target.copy_(source))


class Report:
    """Collects a stage's figures. It is written at each one, so that a stage that is cut keeps its first."""

    def __init__(self, setting: Setting, path: Path) -> None:
        self._setting, self._path = setting, path
        self._measures: list[Measure] = []
        self._skipped: dict[str, str] = {}
        self._details: dict[str, Any] = {}

    def figure(self, id: str, measure: str, value: float, unit: str, target: Target | None = None) -> None:
        """Adds what only a GPU can show: a rehearsal judges no such figure."""
        self._add(id, measure, value, unit, None if self._setting.is_rehearsal else target)

    def check(self, id: str, measure: str, value: float, unit: str, target: Target | None) -> None:
        """Adds what must be true on any device."""
        self._add(id, measure, value, unit, target)

    def skip(self, part: str, reason: str) -> None:
        """Names a part of the stage that cannot be run here."""
        self._skipped[part] = reason
        self._write()

    def note(self, **details: Any) -> None:
        """Adds to what the record alone keeps."""
        self._details |= details
        self._write()

    def _add(self, id: str, measure: str, value: float, unit: str, target: Target | None) -> None:
        wording, is_met = target or ("", None)
        met = None if is_met is None else is_met(value)
        self._measures.append(Measure(id, measure, float(f"{value:.5g}"), unit, wording, met))
        self._write()

    def _write(self) -> None:
        record = {"measures": [asdict(each) for each in self._measures], "skipped": self._skipped}
        self._path.write_text(json.dumps(record | {"details": self._details}), encoding="utf-8")


def main() -> int:
    """Runs one stage of `benchmarks.gpu_check.plan`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.stage", description=__doc__)
    parser.add_argument("module")
    parser.add_argument("found", type=Path)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(arguments.rehearse, arguments.limit)
    if setting.is_rehearsal and importlib.util.find_spec("triton") is not None:
        from benchmarks.interpreter import make_interpreter_quicker

        make_interpreter_quicker()
    module = importlib.import_module(f"benchmarks.gpu_check.{arguments.module}")
    module.run(setting, Report(setting, arguments.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
