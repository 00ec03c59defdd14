"""`lib.reference`: the five figures of the reference interface, of the embedded pair with the default configuration.

Texts are written one at a time in this process, with drafts and by the target alone in turns; ratios of times are
medians over texts.

acceptance_rate   accepted drafted tokens : drafted tokens; corrections and bonus tokens are neither
speedup           seconds of the target alone : seconds with drafts, of whole calls, their prompts included
draft_overhead    seconds in the draft : seconds of whole calls
memory_overhead   bytes of the draft : bytes of the target, each its weights and its KV of the longest text
throughput_gain   tokens a second after a text's first one : those of the target alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.library.texts import prompt_ids, take_turns
from benchmarks.results_file import Found
from benchmarks.timing import median_ratio
from outrider import SpeculativeConfig, SpeculativeDecoder
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.core.stats import SessionStats
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.shared_edge import Prepared
from outrider.experiments.shared.results import Measure, at_least, at_most, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW, NUM_TURNS = 8, 128, 8
ALONE = "alone"
SHORT = 16  # tokens of a text that has no rate


@dataclass(frozen=True, slots=True)
class Text:
    """Holds one text, and how it was written."""

    token_ids: TokenIds
    seconds: float
    stats: SessionStats

    @property
    def decoding_s(self) -> float:
        """Returns the seconds after the first token."""
        times = self.stats.token_times_ns
        return (times[-1] - times[0]) / 1e9

    @property
    def draft_s(self) -> float:
        """Returns the seconds in the draft."""
        return sum(each.draft_ms for each in self.stats.rounds) / 1e3


class Measured(SpeculativeDecoder):
    """Keeps its last text, and writes by the target alone where it is told to."""

    is_alone = False
    last: Text

    def _decode(self, call: Any, is_alone: bool = False, owner: str = "") -> tuple[Prepared, float]:
        prepared, seconds = super()._decode(call, is_alone or self.is_alone, owner)
        result = prepared.session.result
        self.last = Text(result.token_ids, seconds, result.stats)
        return prepared, seconds


def run() -> Found:
    """Returns the measures."""
    with Measured() as decoder:
        decoder.setup(EMBEDDED / "target", SpeculativeConfig(), device="cpu")

        def write(prompt: list[int], seed: int) -> Text:
            decoder.is_alone = False
            decoder.decode_step(prompt, NUM_NEW, seed=seed)
            return decoder.last

        def write_alone(prompt: list[int], seed: int) -> Text:
            decoder.is_alone = True
            decoder.decode_step(prompt, NUM_NEW, seed=seed)
            return decoder.last

        ways = {"drafts": write, ALONE: write_alone, "alone again": write_alone}
        found = take_turns(ways, NUM_PROMPTS, NUM_TURNS)
        memory = _memory(decoder, max(map(len, prompt_ids(NUM_PROMPTS))) + NUM_NEW)
    drafts, alone, again = found.values()
    assert [each.token_ids for each in drafts] == [each.token_ids for each in alone], "the same texts"
    rounds = [each for text in drafts for each in text.stats.rounds if each.is_answered]
    draft_bytes, target_bytes = (
        sum(size for name, size in memory.items() if name.startswith(which)) for which in ("draft", "target")
    )
    pairs = [pair for pair in zip(alone, drafts, strict=True) if len(pair[0].token_ids) > SHORT]
    figures = {
        "acceptance_rate": sum(each.num_accepted_tokens for each in rounds)
        / sum(each.num_draft_tokens for each in rounds),
        "speedup": median_ratio(_seconds(alone), _seconds(drafts)),
        "draft_overhead": median(each.draft_s / each.seconds for each in drafts),
        "memory_overhead": draft_bytes / target_bytes,
        "throughput_gain": median_ratio(
            [each.decoding_s for each, _ in pairs], [each.decoding_s for _, each in pairs]
        ),
    }
    same = median_ratio(_seconds(again), _seconds(alone))
    noise = Measure(
        "lib.reference.same",
        "seconds of the target alone against itself in that run",
        round(same, 4),
        "ratio",
    )
    ms = {name: round(median(_seconds(texts)) * 1e3, 1) for name, texts in found.items()}
    details = {"bytes": memory, "ms_of_a_text": ms, "prompts": NUM_PROMPTS, "new_tokens": NUM_NEW}
    return [*_judge(figures), noise], details


def _judge(figures: dict[str, float]) -> list[Measure]:
    targets = {
        "acceptance_rate": ("0.6 to 0.8", lambda value: 0.6 <= value <= 0.8),
        "speedup": at_least(1.5),
        "draft_overhead": at_most(0.30),
        "memory_overhead": at_most(0.40),
        "throughput_gain": at_least(1.8),
    }
    words = dict(line.split(maxsplit=1) for line in (__doc__ or "").splitlines() if len(line.split()) > 1)
    return [
        judged(f"lib.reference.{name}", words[name], figures[name], "ratio", target)
        for name, target in targets.items()
    ]


def _seconds(texts: Sequence[Text]) -> list[float]:
    return [each.seconds for each in texts]


def _memory(decoder: SpeculativeDecoder, num_tokens: int) -> dict[str, int]:
    """Returns the bytes of draft and target: weights (of the draft in its file), and KV of a text of `num_tokens`."""
    running = decoder._running
    assert running is not None and running.verifier is not None, "the target is in this process"
    use = running.verifier.engine.reported_memory
    return {
        "draft_weights": sum(path.stat().st_size for path in (EMBEDDED / "draft").glob("draft.onnx*")),
        "draft_kv": _draft_kv_bytes(num_tokens),
        "target_weights": use.weights,
        "target_kv": use.kv * num_tokens // running.verifier.backend.num_kv_tokens,
    }


def _draft_kv_bytes(num_tokens: int) -> int:
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        sequence = draft.sequence(SamplingParams())
        sequence.commit([5] * num_tokens)
        sequence.propose(1)
        num_bytes = sequence.num_kv_bytes
        sequence.close()
    return num_bytes
