"""One point in real processes: a verifier, a link, and one edge process that runs every case in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.real.cases import CLOUD_ONLY, LEARNING, Comparison, RealCase
from benchmarks.real.judging import still_needed
from benchmarks.real.points import RealPoint
from benchmarks.results_file import ROOT
from outrider.common.errors import OutriderError, UsageError
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.sweep.config.schema import DIRECT
from outrider.experiments.sweep.edges import EdgeProcess
from outrider.experiments.sweep.observing import Errand
from outrider.training.bank.pairs import BANK, PROMPT_LOOKUP, RUN, BankDraft, BankFolder

EDGE_LOG = ROOT / "benchmarks" / "runs" / "real-edge.log"
BUDGET_S = 120.0  # of a point's turns at least; four times as much for the first USUAL_TURNS
# Over loopback, for each token of a text: one text takes a tenth more or less than the same text again, and what is
# judged are 2 to 3 % of long ones.
NEAR_TOKEN_BUDGET_S = 1.2
USUAL_TURNS, MAX_TURNS = 4, 40
NUM_TRACED_PROMPTS = 4  # virtual time has seen the texts after them
WARM_UP_TOKENS = 8
EARLIER_TOKENS = 100  # of the text before later texts, at most


@dataclass(frozen=True, slots=True)
class BuiltPair:
    """Names the parts of a pair."""

    target_dir: str
    draft_dir: str
    draft_strategy: str
    prompts: list[Prompt]


def find_draft(target: str, draft: str) -> tuple[BankFolder, BankDraft]:
    """Returns where a target of the bank is, and one of its drafts."""
    folder = BankFolder(ROOT / RUN, next(each for each in BANK if each.name == target))
    return folder, next(each for each in folder.target.drafts if each.name == draft)


def find_pair(point: RealPoint) -> BuiltPair:
    """Returns a point's pair of the bank. Raises `UsageError` where it is not built."""
    folder, draft = find_draft(point.target, point.draft)
    parts = [folder.target_dir / "config.json", folder.prompts]
    if draft.name != PROMPT_LOOKUP:
        parts.append(folder.draft_dir(draft) / "draft.json")
    if missing := [str(part) for part in parts if not part.is_file()]:
        raise UsageError(
            f"no {', '.join(missing)}: run `make pair-bank` first, which builds the bank's pairs"
        )
    prompts = load_prompts(folder.prompts)[NUM_TRACED_PROMPTS:]
    return BuiltPair(str(folder.target_dir), str(folder.draft_dir(draft)), draft.strategy, prompts)


@dataclass(slots=True)
class PointRuns:
    """Holds what a point's cases took, turn by turn."""

    realisation: str
    ms: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))  # a token, by case
    seen: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )  # answers, by case
    num_turns: int = 0
    num_other_texts: int = 0  # that differ from cloud-only's of their turn
    load_averages: list[float] = field(default_factory=list)  # of a minute, at the start and after each turn


def budget_of(point: RealPoint) -> float:
    """Returns the seconds that a point's turns have."""
    return max(BUDGET_S, NEAR_TOKEN_BUDGET_S * point.num_tokens) if point.is_near else BUDGET_S


def run_point(
    point: RealPoint, cases: Sequence[RealCase], compared: Sequence[Comparison], budget_s: float | None = None
) -> PointRuns:
    """Runs the cases in turns until the budget (None: `budget_of` the point) is spent; after two turns, those that may
    still decide something. Raises `OutriderError` where a text cannot be decoded."""
    pair = find_pair(point)
    flags = ("--log-level", "warning", "--min-forward-ms", str(point.min_forward_ms), "--draft", "none")
    with (
        running_verifier("--target", pair.target_dir, *flags) as verifier,
        _link(point, verifier.address) as (realisation, address),
        start_edge() as edge,
    ):
        turns = _Turns(point, pair, edge, address, PointRuns(realisation))
        turns.warm_up(cases)
        turns.run_all(list(cases), compared, budget_of(point) if budget_s is None else budget_s)
        return turns.runs


@contextlib.contextmanager
def start_edge() -> Iterator[EdgeProcess]:
    """Starts an edge, and ends it afterwards."""
    EDGE_LOG.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(EdgeProcess(EDGE_LOG)) as edge:
        yield edge


@contextlib.contextmanager
def _link(point: RealPoint, upstream: str) -> Iterator[tuple[str, str]]:
    """Yields how the link is realised, and the address to dial: packets where this machine allows it, else a
    proxy."""
    if point.is_near:
        yield DIRECT, upstream
        return
    profile = LinkProfile(name="point", rtt_ms=point.rtt_ms)
    tun = create_realisation("tun")
    realisation = create_realisation("proxy") if tun.refusals(profile) else tun
    with realisation.open(profile, upstream) as link:
        yield realisation.name, link.address


def has_time(num_turns: int, elapsed_s: float, pair_s: float, budget_s: float) -> bool:
    """Returns whether a pair of turns that takes `pair_s` fits after so many; the first one always does."""
    limit_s = budget_s if num_turns >= USUAL_TURNS else 4 * budget_s
    return num_turns == 0 or (num_turns < MAX_TURNS and elapsed_s + pair_s <= limit_s)


class _Turns:
    """Runs turns: in each of them all cases write the same text, in an order of its own."""

    def __init__(
        self, point: RealPoint, pair: BuiltPair, edge: EdgeProcess, address: str, runs: PointRuns
    ) -> None:
        self.runs = runs
        self._point, self._pair, self._edge = point, pair, edge
        self._random = random.Random(f"turns {point.number}")
        self._prompts = self._random.sample(pair.prompts, len(pair.prompts))
        self._settings = {
            "verifier": address,
            "draft": pair.draft_dir,
            "draft_strategy": pair.draft_strategy,
            "min_draft_ms": point.min_draft_ms,
            "temperature": point.temperature,
            "on_timeout": "wait",
            "ignore_eos": True,
        }

    def warm_up(self, cases: Sequence[RealCase]) -> None:
        """Lets every case write a little, so that all is loaded, and a text before those that are later ones."""
        for case in cases:
            learns = case in LEARNING and not self._point.is_first
            longest = EARLIER_TOKENS if learns else WARM_UP_TOKENS
            self._ask(case, -1, min(self._point.num_tokens, longest))

    def run_all(self, cases: list[RealCase], compared: Sequence[Comparison], budget_s: float) -> None:
        """Runs pairs of turns, of which one chooses and one compares, while there is time for another."""
        runs, start_s, pair_s = self.runs, time.monotonic(), 0.0
        while has_time(runs.num_turns, time.monotonic() - start_s, pair_s, budget_s):
            pair_start_s = time.monotonic()
            for _ in range(2):
                self._run_turn(cases)
            needed = still_needed(runs.ms, compared)
            cases = [case for case in cases if case.name in needed]
            pair_s = time.monotonic() - pair_start_s

    def _run_turn(self, cases: Sequence[RealCase]) -> None:
        turn, runs = self.runs.num_turns, self.runs
        # Afterwards the verifier has read the prompt, for whichever case is the first.
        expected = self._ask(CLOUD_ONLY, turn, 2)["request"]["token_ids"]
        texts: dict[str, list[int]] = {}
        for case in self._random.sample(cases, len(cases)):
            answer = self._ask(case, turn, self._point.num_tokens)
            runs.ms[case.name][turn] = answer["request"]["tpot_ms"]
            runs.seen[case.name].append(answer)
            texts[case.name] = answer["request"]["token_ids"]
        expected = texts.get(CLOUD_ONLY.name) or next(iter(texts.values()))
        runs.num_other_texts += sum(text != expected for text in texts.values())
        runs.num_turns += 1
        runs.load_averages.append(round(os.getloadavg()[0], 2))

    def _ask(self, case: RealCase, turn: int, num_tokens: int) -> dict[str, Any]:
        prompt = self._prompts[turn % len(self._prompts)]
        settings = {**self._settings, **case.settings, "max_new_tokens": num_tokens}
        prior = "" if self._point.is_first else case.name
        return ask_edge(self._edge, case.name, settings, prompt, 1000 * self._point.number + turn + 1, prior)


def ask_edge(
    edge: EdgeProcess, case: str, settings: Mapping[str, Any], prompt: Prompt, seed: int, prior: str = ""
) -> dict[str, Any]:
    """Returns what an edge answers to one request (`outrider.experiments.sweep.worker`). Raises `OutriderError` where
    the text could not be decoded."""
    errand = Errand(
        cell=case, request="", repeat=0, session=0, prompt=prompt.id, seed=seed, link_opened_s=0.0
    )
    job = {
        "op": "run",
        "settings": dict(settings),
        "errand": dataclasses.asdict(errand),
        "text": prompt.text,
        "prior": prior,
    }
    answer = edge.ask(job)
    if trouble := answer["request"]["error"]:
        raise OutriderError(f"{case}, prompt {prompt.id}: {trouble}")
    return answer


# ------------------------------------------------------------------------------------------ in words


def describe_case(answers: Sequence[Mapping[str, Any]], ms: Mapping[int, float]) -> str:
    """Returns what a case's runs took, and what their rounds measured: medians, lengths and acceptance as means."""
    rounds = [each for answer in answers for each in answer["rounds"] if each["is_answered"]]
    words = f"{statistics.fmean(ms.values()):.2f} ms a token in {len(ms)} turns"
    drafted = sum(each["num_draft_tokens"] for each in rounds)
    if not drafted:
        return words
    accepted = sum(each["num_accepted_tokens"] for each in rounds)
    times = {
        "a drafted token": sum(each["draft_ms"] for each in rounds) / drafted,
        "trip": _median(rounds, "net_ms"),
        "verifier": _median(rounds, "verifier_ms"),
        "forward": _median(rounds, "forward_ms"),
    }
    if rests_ms := [rest for answer in answers for rest in _rests_ms(answer["rounds"])]:
        times["the rest of a round"] = statistics.median(rests_ms)
    return (
        f"{words}; {len(rounds)} rounds, {drafted / len(rounds):.1f} drafted, {accepted / len(rounds):.2f} accepted; "
        f"ms: {', '.join(f'{name} {value:.2f}' for name, value in times.items())}"
    )


def _median(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(each[key] for each in rounds))


def _rests_ms(rounds: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Yields what synchronous rounds took that was neither drafting nor waiting for the answer."""
    for before, each in itertools.pairwise(rounds):
        if each["pipelined_hit"] is None and before["pipelined_hit"] is None:
            yield each["at_ms"] - before["at_ms"] - each["draft_ms"] - each["rtt_ms"]


def describe_stretches(answer: Mapping[str, Any]) -> str:
    """Returns which mode made which tokens of one run, at what ms a token, and in brackets what each mode was
    expected to take when it was chosen."""
    stretches, times_ms = answer["stretches"], answer["request"]["token_times_ms"]
    starts = [max(1, each["start"]) for each in stretches]
    found = []
    for each, start, end in zip(stretches, starts, [*starts[1:], len(times_ms)], strict=True):
        if end > start:
            token_ms = (times_ms[end - 1] - times_ms[start - 1]) / (end - start)
            expected = ", ".join(f"{mode} {ms:.1f}" for mode, ms in each["expected_ms"].items())
            found.append(f"{each['mode']} {end - start} at {token_ms:.2f} ({expected})")
    return "; ".join(found)
