"""Writes the traces of `experiments/links/traces`: `python -m tests.support.link_traces [--check]`.

They are synthetic. The log of the rate wanders around its mean (an Ornstein-Uhlenbeck process, in steps of
10 ms), opportunities within a ms are Poisson, as Winstein et al. (NSDI 2013) model cellular links; handovers
stop everything for a while. The figures below are chosen, not fitted to anybody's recording.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.common.errors import UsageError
from outrider.experiments.links.traces import OPPORTUNITY_BYTES, OWN_TRACES
from outrider.experiments.shared.command import run_command

_STEP_MS = 10


@dataclass(frozen=True, slots=True)
class _TraceModel:
    name: str
    story: str
    mean_mbit: float  # median of the wandering rate
    spread: float  # standard deviation of its log
    memory_s: float  # after which it has forgotten where it was
    seconds: int
    handover_every_s: float = 0.0  # mean, exponential; 0: never
    handover_ms: tuple[int, int] = (0, 0)  # how long nothing passes, from-to
    seed: int = 1


MODELS = (
    _TraceModel("lte-walk-up.trace", "LTE upwards, on foot", 2.0, 0.5, 2.0, 20),
    _TraceModel("lte-walk-down.trace", "LTE downwards, on foot", 6.0, 0.5, 2.0, 20),
    _TraceModel("lte-drive-up.trace", "LTE upwards, by car", 1.5, 1.0, 0.7, 20, 7.0, (60, 500)),
    _TraceModel("lte-drive-down.trace", "LTE downwards, by car", 5.0, 1.0, 0.7, 20, 7.0, (60, 500)),
    # Starlink gives dishes their satellites anew every 15 s, all at once (arXiv:2310.09242).
    _TraceModel("leo-up.trace", "satellites in low orbit, upwards", 6.0, 0.3, 3.0, 15, 5.0, (80, 200)),
)


def opportunities(model: _TraceModel) -> list[int]:
    """Times in ms, from 0 to the period, which is the last one."""
    source, times = random.Random(f"{model.name}/{model.seed}"), []
    pull = math.exp(-_STEP_MS / 1000 / model.memory_s)
    push = model.spread * math.sqrt(1 - pull * pull)
    deviation, blocked_until_ms = source.gauss(0, model.spread), 0
    mean_per_ms = model.mean_mbit * 1e6 / 8 / OPPORTUNITY_BYTES / 1000
    for step_ms in range(0, model.seconds * 1000, _STEP_MS):
        deviation = deviation * pull + push * source.gauss(0, 1)
        if model.handover_every_s and source.random() < _STEP_MS / 1000 / model.handover_every_s:
            blocked_until_ms = step_ms + source.randint(*model.handover_ms)
        for time_ms in range(max(step_ms, blocked_until_ms), step_ms + _STEP_MS):
            times += [time_ms] * _poisson(mean_per_ms * math.exp(deviation), source)
    return [*times, model.seconds * 1000]


def _poisson(mean: float, source: random.Random) -> int:
    bound, product, count = math.exp(-mean), source.random(), 0
    while product > bound:
        product *= source.random()
        count += 1
    return count


def trace_lines(model: _TraceModel) -> Iterator[str]:
    """Yields the lines of a trace's file."""
    yield from map(str, opportunities(model))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.link_traces", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare with what is there")
    is_check = parser.parse_args().check
    for model in MODELS:
        path, text = OWN_TRACES / model.name, "\n".join(trace_lines(model)) + "\n"
        if is_check and (not path.exists() or path.read_text(encoding="ascii") != text):
            raise UsageError(f"{path} is not what its model makes; run without --check")
        if not is_check:
            path.write_text(text, encoding="ascii")
            print(f"{path}: {model.story}, {len(text):,} bytes")
    return 0


if __name__ == "__main__":
    run_command("link_traces", main)
