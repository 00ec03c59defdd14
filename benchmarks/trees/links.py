"""Trees in real processes: over emulated links, beside pipelined chains with guesses and beside co-located drafting.
Each case has an edge of its own, all share a verifier; cases take turns, prompt by prompt, and every text is compared
with cloud-only's."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.results_file import Found
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

TEMPERATURE, NUM_NEW, NUM_PROMPTS = 0.8, 96, 6
FORWARD_MS = 30.0  # of a target that is stretched
LENGTHS, NODES = (4, 8, 16), (16, 32, 64)

Settings = Mapping[str, Any]
CLOUD_ONLY: dict[str, Settings] = {"cloud-only": {"mode": "cloud-only"}}
CHAINS: dict[str, Settings] = {
    **{
        f"chain {n}": {"mode": "speculative", "pipeline": "off", "num_speculative_tokens": n} for n in LENGTHS
    },
    "optimal": {"mode": "speculative", "pipeline": "off", "tree": "off"},
}
TREES: dict[str, Settings] = {
    f"tree {n}": {"mode": "speculative", "pipeline": "off", "tree": n} for n in NODES
}
PIPELINED: dict[str, Settings] = {
    f"pipelined tree {n}": {"mode": "speculative", "pipeline": "on", "tree": n} for n in NODES
}
GUESSES: dict[str, Settings] = {"guesses": {"mode": "speculative", "pipeline": "on"}}
COLOCATED: dict[str, Settings] = {
    f"co-located {n}": {"mode": "co-located", "num_speculative_tokens": n} for n in LENGTHS
}
COLOCATED_TREES: dict[str, Settings] = {
    f"co-located tree {n}": {"mode": "co-located", "tree": n} for n in NODES
}


@dataclass(slots=True)
class Turns:
    """Holds milliseconds a token of each case, prompt by prompt, and bytes up and nodes of its rounds."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    num_nodes: dict[str, int] = field(default_factory=dict)
    num_other_texts: int = 0

    def median(self, name: str) -> float:
        """Returns the median of a case."""
        return statistics.median(self.ms[name])

    def best(self, names: Sequence[str]) -> str:
        """Returns the fastest of some cases."""
        return min(names, key=self.median)

    def ratio(self, subject: str, other: str) -> float:
        """Returns the median over prompts of the subject's time : the other's."""
        return statistics.median(a / b for a, b in zip(self.ms[subject], self.ms[other], strict=True))


def run() -> Found:
    """Returns the measures."""
    prompts = load_prompts(EMBEDDED / "prompts.jsonl")[:NUM_PROMPTS]
    measures: list[Measure] = []
    details: dict[str, Any] = {}
    bounds = {50.0: ("tree.rtt50", 0.88), 200.0: ("tree.rtt200", 0.76)}
    for rtt_ms, (id, bound) in bounds.items():
        turns = play(prompts, rtt_ms, 0.0, {**CLOUD_ONLY, **CHAINS, **TREES})
        details[f"RTT {rtt_ms:g}"] = told(turns)
        measures.append(_best_of(turns, id, f"RTT {rtt_ms:g} ms, time a token", TREES, CHAINS, bound))
        if rtt_ms == 50.0:
            share = turns.bytes_up["tree 64"] / turns.num_nodes["tree 64"]
            what = "bytes up a node, whole messages, trees of 64 nodes"
            measures.append(judged("tree.bytes", what, share, "bytes", at_most(6)))
    for rtt_ms in (60.0, 200.0):
        turns = play(prompts, rtt_ms, FORWARD_MS, {**CLOUD_ONLY, **GUESSES, **TREES, **PIPELINED})
        details[f"RTT {rtt_ms:g}, forward 30"] = told(turns)
        what = f"RTT {rtt_ms:g}, forward 30 ms, time a token"
        name = f"tree.vs_guesses_{rtt_ms:g}"
        measures.append(_best_of(turns, name, what, {**TREES, **PIPELINED}, GUESSES, 0.90))
    for rtt_ms, bound in ((20.0, 1.15), (60.0, 1.4)):
        cases = {**CLOUD_ONLY, **COLOCATED, **TREES, **PIPELINED}
        turns = play(prompts, rtt_ms, FORWARD_MS, cases, min_draft_ms=1.0)
        details[f"RTT {rtt_ms:g}, forward 30, draft 1, beside co-located"] = told(turns)
        name = f"tree.vs_colocated_{rtt_ms:g}"
        what = f"RTT {rtt_ms:g}, forward 30 ms, draft 1 ms at the edge, time a token"
        measures.append(_best_of(turns, name, what, {**TREES, **PIPELINED}, COLOCATED, bound))
    turns = play(prompts, 0.0, 0.0, {**CLOUD_ONLY, **COLOCATED, **COLOCATED_TREES})
    details["co-located"] = told(turns)
    best = turns.best(list(COLOCATED_TREES)), turns.best(list(COLOCATED))
    what = f"tokens/s over loopback, {best[0]} : {best[1]}"
    measures.append(judged("tree.colocated", what, 1 / turns.ratio(*best), "ratio", at_least(1.0)))
    return measures, details


def _best_of(
    turns: Turns,
    id: str,
    what: str,
    subjects: Mapping[str, Settings],
    others: Mapping[str, Settings],
    bound: float,
) -> Measure:
    subject, other = turns.best(list(subjects)), turns.best(list(others))
    text = f"{what}, {subject} ({turns.median(subject):.1f} ms) : {other} ({turns.median(other):.1f} ms)"
    return judged(id, text, turns.ratio(subject, other), "ratio", at_most(bound))


def told(turns: Turns) -> dict[str, Any]:
    """Returns what a run found, as JSON takes it."""
    return {
        "ms_a_token": {name: [round(each, 2) for each in ms] for name, ms in turns.ms.items()},
        "num_other_texts": turns.num_other_texts,
    }


def play(
    prompts: Sequence[Prompt],
    rtt_ms: float,
    forward_ms: float,
    cases: Mapping[str, Settings],
    *,
    num_sessions: int = 1,
    num_new: int = NUM_NEW,
    min_draft_ms: float = 0.0,
) -> Turns:
    """Decodes every prompt with every case in turn, by so many sessions at once."""
    flags = ("--target", str(EMBEDDED / "target"), "--log-level", "warning", "--num-threads", "1")
    turns = Turns()
    with (
        running_verifier(*flags, "--min-forward-ms", str(forward_ms)) as verifier,
        _link(rtt_ms, verifier.address) as address,
        contextlib.ExitStack() as stack,
    ):
        edges = {
            name: [
                stack.enter_context(_edge(address, each, num_new, min_draft_ms)) for _ in range(num_sessions)
            ]
            for name, each in cases.items()
        }
        for number, prompt in enumerate(prompts):
            expected: list[list[int]] = []
            for name in cases:
                texts = _decode(turns, name, edges[name], prompt, number)
                expected = expected or texts
                turns.num_other_texts += sum(a != b for a, b in zip(texts, expected, strict=True))
    assert not turns.num_other_texts, "speculation changed a text"
    print({name: round(turns.median(name), 2) for name in cases}, flush=True)
    return turns


def _decode(turns: Turns, name: str, edges: Sequence[Edge], prompt: Prompt, number: int) -> list[list[int]]:
    """Decodes one text in each edge, all at once, and adds what they took."""
    texts: list[list[int]] = [[] for _ in edges]
    times: list[float] = [0.0] * len(edges)

    def decode(place: int) -> None:
        session = edges[place].session(prompt.text, seed=100 * number + place)
        for _ in session.generate():
            pass
        result = session.result
        at_ns = result.stats.token_times_ns
        texts[place], times[place] = list(result.token_ids), (at_ns[-1] - at_ns[0]) / (len(at_ns) - 1) / 1e6
        if place == 0:
            rounds = [each for each in result.stats.rounds if each.is_answered]
            turns.bytes_up[name] = turns.bytes_up.get(name, 0) + sum(each.bytes_up for each in rounds)
            nodes = sum(each.num_draft_tokens for each in rounds)
            turns.num_nodes[name] = turns.num_nodes.get(name, 0) + nodes

    threads = [threading.Thread(target=decode, args=(place,)) for place in range(len(edges))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns.ms.setdefault(name, []).append(statistics.fmean(times))
    return texts


@contextlib.contextmanager
def _edge(address: str, settings: Settings, num_new: int, min_draft_ms: float) -> Iterator[Edge]:
    common = {
        "verifier": address,
        "temperature": TEMPERATURE,
        "max_new_tokens": num_new,
        "ignore_eos": True,
        "on_timeout": "wait",
        "min_draft_ms": min_draft_ms if settings.get("mode") != "co-located" else 0.0,
    }
    config = run_config(**common | dict(settings))
    edge = create_edge(config)
    try:
        yield edge
    finally:
        edge.close()


@contextlib.contextmanager
def _link(rtt_ms: float, upstream: str) -> Iterator[str]:
    if not rtt_ms:
        yield upstream
        return
    with create_realisation("proxy").open(LinkProfile(name="link", rtt_ms=rtt_ms), upstream) as link:
        yield link.address
