"""The runs that a plan is checked against: every case in turn over one link, by one pair."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.sessions import Sessions, tpot_s
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.synthetic.draft import SyntheticDraft, SyntheticTokenizer
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic
from outrider.models import EMBEDDED

TEMPERATURE = 0.8
SPECULATIVE = tuple(Case(ExecutionMode.SPECULATIVE, TEMPERATURE, n) for n in (1, 4, 8))
CASES = (
    *SPECULATIVE,
    Case(ExecutionMode.CLOUD_ONLY, TEMPERATURE),
    Case(ExecutionMode.CO_LOCATED, TEMPERATURE, 4),
    Case(ExecutionMode.EDGE_ONLY, TEMPERATURE, 4),
)

DecodeAt = Callable[[str], Decoder]
"""A decoder through the link whose address is given."""


@dataclass(kw_only=True)
class Runs(Sessions):
    """Holds the sessions of one case at one RTT."""

    case: Case

    def tpot_s(self, results: Sequence[SessionResult] | None = None) -> float:
        """Returns seconds a token: the mean over texts, as a plan is for their mean, of the repeats' medians."""
        by_text: dict[tuple[int, ...], list[float]] = {}
        for result in self.results if results is None else results:
            by_text.setdefault(tuple(result.token_ids), []).append(tpot_s(result))
        return statistics.fmean(map(statistics.median, by_text.values()))

    @property
    def aa(self) -> float:
        """Returns the A/A ratio: odd repeats : even repeats."""
        return self.tpot_s(self.results[1::2]) / self.tpot_s(self.results[::2])

    @property
    def num_after_first(self) -> int:
        """Returns the tokens of each text after its first one, which comes with the opening."""
        return len(self.results[0].token_ids) - 1

    @property
    def texts(self) -> list[list[tuple[int, int]]]:
        """Returns (accepted, drafted) of each round, by session."""
        return [
            [(each.num_accepted_tokens, each.num_draft_tokens) for each in result.stats.rounds]
            for result in self.results
        ]


@contextlib.contextmanager
def decoding(
    pair: SyntheticPair | None, min_forward_ms: float, min_draft_ms: float
) -> Iterator[tuple[str, DecodeAt]]:
    """Starts a verifier; yields its address, and a function from an address that leads there to a decoder."""
    if pair is not None:
        tokenizer = cast(EdgeTokenizer, SyntheticTokenizer())
        with running_synthetic(pair) as verifier:
            yield verifier.address, lambda address: Decoder(address, SyntheticDraft(pair), tokenizer)
        return
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    flags = ("--min-forward-ms", str(min_forward_ms), "--log-level", "warning")
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft, running_verifier(*flags) as verifier:
        yield verifier.address, lambda address: Decoder(address, draft, tokenizer, min_draft_ms / 1e3)


def run_all(decoder: Decoder, num_repeats: int, num_new: int) -> dict[str, Runs]:
    """Runs every case in every repeat, every second time in the opposite order, after one to warm up."""
    prompts = load_prompts(limit=num_repeats)
    runs = {case.name: Runs(case=case) for case in CASES}
    for case in CASES:
        decoder.decode(prompts[0].text, case, min(16, num_new))
    for repeat in range(num_repeats):
        # Two repeats share a prompt and a seed, so that A/A compares the same texts.
        prompt, seed = prompts[repeat // 2 % len(prompts)], 1 + repeat // 2
        for case in CASES if repeat % 2 else reversed(CASES):
            # Edge-only is over soonest, and a stall weighs most in it.
            length = num_new * (4 if case.mode is ExecutionMode.EDGE_ONLY else 1)
            runs[case.name].results.append(decoder.decode(prompt.text, case, length, seed))
    return runs
