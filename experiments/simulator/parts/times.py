"""Holds what everything takes, as `python -m outrider.experiments.simulator.measure` measures it."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outrider.common.config.loader import load_config, option
from outrider.common.errors import UsageError

TIMES = Path(__file__).resolve().parents[1] / "times"
DEFAULT_TIMES = "embedded-2-cores"  # of the machine that the benchmarks of this repository run on

PartT = TypeVar("PartT")

_DRIFT_SLICE_S = 0.02  # in which a busy machine's load stays as it is


@dataclass(frozen=True, slots=True)
class VerifierTimes:
    """Holds a verifier's times. A step of s sessions that feeds n tokens, m of them nodes of trees, and reads keys
    of c tokens before them, takes step + s session + n token + m node + c context; then each answer takes `answer`,
    one after the other."""

    step_ms: float = option(0.0, "of every forward", minimum=0)
    session_ms: float = option(0.0, "more for each session in it", minimum=0)
    token_ms: float = option(0.0, "more for each token fed", minimum=0)
    node_ms: float = option(0.0, "more than that for each token of a tree", minimum=0)
    context_ms: float = option(0.0, "more for each 1,000 tokens of KV read", minimum=0)
    answer_ms: float = option(0.0, "verification and commit of one session, in the step", minimum=0)
    receive_ms: float = option(0.0, "from a socket to the engine", minimum=0)
    send_ms: float = option(0.0, "from the engine to a socket", minimum=0)
    drift: float = option(
        0.0, "standard deviation of a forward's logarithm, as other load comes and goes", minimum=0
    )
    drift_s: float = option(
        1.0, "for which that load lasts (its autocorrelation falls to 1/e)", minimum=0.001
    )
    jitter: float = option(0.0, "the same from one forward to the next", minimum=0)

    def step_s(self, num_sessions: int, num_tokens: int, num_context: int, num_nodes: int = 0) -> float:
        """Returns the seconds of a forward, without its answers."""
        context_ms = num_context * self.context_ms / 1000
        step_ms = self.step_ms + num_sessions * self.session_ms + num_tokens * self.token_ms + context_ms
        return (step_ms + num_nodes * self.node_ms) / 1e3


class BusyMachine:
    """Says by which factor forwards take longer or shorter, on a machine that has other things to do: an
    Ornstein-Uhlenbeck process in the factor's logarithm, and jitter. The drift is a function of seed and time alone, so
    that settings that are compared meet the same load."""

    def __init__(self, times: VerifierTimes, seed: str) -> None:
        self._times = times
        self._drifts, self._jitters = random.Random(f"{seed} drift"), random.Random(f"{seed} jitter")
        self._memory = math.exp(-_DRIFT_SLICE_S / times.drift_s)
        self._drift, self._slice = self._drifts.gauss(0.0, times.drift), 0

    def factor(self, now_s: float) -> float:
        """Returns that of a forward which begins now; time does not go back."""
        innovation = self._times.drift * math.sqrt(1 - self._memory**2)
        while (self._slice + 1) * _DRIFT_SLICE_S <= now_s:
            self._drift = self._memory * self._drift + self._drifts.gauss(0.0, innovation)
            self._slice += 1
        return math.exp(self._drift + self._jitters.gauss(0.0, self._times.jitter))


@dataclass(frozen=True, slots=True)
class EdgeTimes:
    """Holds an edge's times beside drafting."""

    connect_ms: float = option(0.0, "making a connection, beside the link's round trips", minimum=0)
    send_ms: float = option(0.0, "from the session to a socket", minimum=0)
    receive_ms: float = option(0.0, "from a socket to the session", minimum=0)
    commit_ms: float = option(0.0, "taking an answer: bookkeeping and showing it", minimum=0)


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Holds what drafting takes."""

    token_ms: float = option(0.0, "a drafted token, and a tree's run of one row", minimum=0)
    tree_row_ms: float = option(0.0, "a further row of a tree's run", minimum=0)
    call_ms: float = option(0.0, "a draft, whatever its length", minimum=0)
    read_token_ms: float = option(0.0, "a token of text that it reads at once, a prompt's say", minimum=0)


@dataclass(frozen=True, slots=True)
class SystemTimes:
    """Holds the times of every part."""

    verifier: VerifierTimes = dataclasses.field(default_factory=VerifierTimes)
    edge: EdgeTimes = dataclasses.field(default_factory=EdgeTimes)
    draft: DraftTimes = dataclasses.field(default_factory=DraftTimes)
    cloud_draft: DraftTimes = dataclasses.field(default_factory=DraftTimes)  # co-located
    source: str = ""  # what was measured, where, by which command


def load_times(source: object) -> SystemTimes:
    """Reads times of a mapping, of a file, or of `experiments/simulator/times/NAME.json`; "none" takes no
    time at all. Raises `UsageError`."""
    if source == "none":
        return SystemTimes(source="none")
    if isinstance(source, Mapping):
        return load_config(SystemTimes, content=(source, "times"), env={}).value
    name = str(source)
    path = Path(name) if name.endswith(".json") else TIMES / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = sorted(each.stem for each in TIMES.glob("*.json"))
        raise UsageError(
            f"times: cannot read {path}: {error}; give a .json file, none, or one of {', '.join(known)}"
        ) from error
    return load_config(SystemTimes, content=(content, str(path)), env={}).value


def save_times(times: SystemTimes, path: Path) -> None:
    """Writes the times as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(times), indent=1) + "\n", encoding="utf-8")


def changed(part: PartT, changes: Mapping[str, Any] | None, where: str) -> PartT:
    """Returns `part` with some of its numbers replaced. Raises `ConfigError` naming `where` and the key."""
    if not changes:
        return part
    content = {**dataclasses.asdict(part), **changes}  # type: ignore[call-overload]
    return load_config(type(part), content=(content, where), env={}).value
