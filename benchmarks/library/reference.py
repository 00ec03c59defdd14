"""`lib.reference`: the five figures of the reference interface, of the embedded pair with the default configuration.

Texts are written one at a time in this process, with drafts and by the target alone in turns.

acceptance_rate   accepted drafted tokens : drafted tokens; corrections and bonus tokens are neither
speedup           seconds of the target alone : seconds with drafts, of whole calls, their prompts included
draft_overhead    seconds in the draft : seconds of whole calls
memory_overhead   bytes of the draft : bytes of the target, each its weights and its KV of the longest text
throughput_gain   tokens a second after each text's first one : those of the target alone
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.library.prompts import prompt_ids
from benchmarks.results_file import Found
from benchmarks.timing import alternate, median_ratio
from outrider import SpeculativeConfig, SpeculativeDecoder
from outrider.decoder.stats import Counts
from outrider.edge_client.session.shared_edge import Prepared
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW, NUM_TURNS = 8, 128, 5
RATES = (0.6, 0.8)


@dataclass
class Turn:
    """Holds one way's writing of all prompts."""

    seconds: float = 0.0
    seconds_after_first: float = 0.0
    draft_s: float = 0.0
    num_tokens: int = 0
    counts: Counts = field(default_factory=Counts)
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, prepared: Prepared, seconds: float) -> None:
        """Adds a text."""
        result = prepared.session.result
        times = result.stats.token_times_ns
        self.seconds += seconds
        self.seconds_after_first += (times[-1] - times[0]) / 1e9
        self.draft_s += sum(each.draft_ms for each in result.stats.rounds) / 1e3
        self.num_tokens += len(times) - 1
        self.counts.add(result.stats, len(times))
        self.texts.append(result.token_ids)


class Measured(SpeculativeDecoder):
    """Keeps what it decoded."""

    turn = Turn()
    is_alone = False

    def _decode(self, call: Any, is_alone: bool = False) -> tuple[Prepared, float]:
        prepared, seconds = super()._decode(call, is_alone or self.is_alone)
        self.turn.add(prepared, seconds)
        return prepared, seconds


def run() -> Found:
    """Returns the measures."""
    prompts = prompt_ids(NUM_PROMPTS)
    turns: dict[str, list[Turn]] = {"drafts": [], "alone": [], "alone again": []}
    with Measured() as decoder:
        decoder.setup(EMBEDDED / "target", SpeculativeConfig(log_acceptance_rate=False), device="cpu")

        def write(name: str) -> float:
            decoder.turn, decoder.is_alone = Turn(), name != "drafts"
            for seed, prompt in enumerate(prompts):
                decoder.decode_step(prompt, NUM_NEW, seed=seed)
            turns[name].append(decoder.turn)
            return decoder.turn.seconds

        seconds = alternate({name: lambda name=name: write(name) for name in turns}, NUM_TURNS)  # type: ignore[misc]
        memory, parts = _memory(decoder, max(map(len, prompts)) + NUM_NEW)
    drafts, alone = turns["drafts"][1:], turns["alone"][1:]
    assert drafts[-1].texts == alone[-1].texts, "the same texts"
    gain = median_ratio([_rate(each) for each in drafts], [_rate(each) for each in alone])
    found = {
        "acceptance_rate": statistics.median(each.counts.acceptance_rate for each in drafts),
        "speedup": median_ratio(seconds["alone"], seconds["drafts"]),
        "draft_overhead": statistics.median(each.draft_s / each.seconds for each in drafts),
        "memory_overhead": memory,
        "throughput_gain": gain,
    }
    same = median_ratio(seconds["alone again"], seconds["alone"])
    tokens = [round(_rate(each), 1) for each in alone]
    details = {"memory": parts, "tokens_per_s_alone": tokens, "texts": NUM_PROMPTS, "new_tokens": NUM_NEW}
    return [
        *_judge(found),
        Measure("lib.reference.same", "seconds alone : alone again", round(same, 4), "ratio"),
    ], details


def _judge(found: dict[str, float]) -> Sequence[Measure]:
    low, high = RATES
    targets = {
        "acceptance_rate": (f"{low:g} to {high:g}", lambda value: low <= value <= high),
        "speedup": at_least(1.5),
        "draft_overhead": at_most(0.30),
        "memory_overhead": at_most(0.40),
        "throughput_gain": at_least(1.8),
    }
    words = dict(
        line.split(maxsplit=1) for line in (__doc__ or "").splitlines() if line.split(" ")[0] in targets
    )
    return [
        judged(f"lib.reference.{name}", words[name], found[name], "ratio", target)
        for name, target in targets.items()
    ]


def _rate(turn: Turn) -> float:
    return turn.num_tokens / turn.seconds_after_first


def _memory(decoder: SpeculativeDecoder, num_tokens: int) -> tuple[float, dict[str, int]]:
    """Returns the draft's bytes : the target's, and the parts."""
    running = decoder._running
    assert running is not None and running.verifier is not None, "the target is in this process"
    pool = running.connection._shared
    backend = running.verifier.backend
    use = running.verifier.engine.told_memory
    parts = {
        "draft_weights": sum(path.stat().st_size for path in (EMBEDDED / "draft").glob("draft.onnx*")),
        "draft_kv": pool.num_idle_bytes,
        "target_weights": use.weights,
        "target_kv": use.kv * num_tokens // backend.num_kv_tokens,
    }
    draft, target = (
        sum(parts[f"{name}_{what}"] for what in ("weights", "kv")) for name in ("draft", "target")
    )
    return draft / target, parts
