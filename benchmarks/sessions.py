"""Whole sessions of several cases, decoded in turns, and the figures of the sessions of one case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.common.sequences import acceptance_by_position
from outrider.common.types import Origin
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.session.session import SessionResult
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import Prompt


def tpot_s(result: SessionResult) -> float:
    """Returns the seconds per output token after the first one."""
    times_ns = result.stats.token_times_ns
    return (times_ns[-1] - times_ns[0]) / 1e9 / (len(times_ns) - 1)


@dataclass
class Sessions:
    """Holds the sessions of one case, one a prompt."""

    results: list[SessionResult] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Returns output tokens a second after the first one, the median of the sessions."""
        return 1 / statistics.median(map(tpot_s, self.results))

    @property
    def rounds(self) -> list[RoundRecord]:
        """Returns the answered rounds of all sessions."""
        return [each for result in self.results for each in result.stats.rounds if each.is_answered]

    @property
    def acceptance_rate(self) -> float:
        """Returns accepted / drafted tokens."""
        return sum(r.num_accepted_tokens for r in self.rounds) / sum(r.num_draft_tokens for r in self.rounds)

    @property
    def tokens_per_round(self) -> float:
        """Returns committed tokens / answered rounds; the first token of a text comes with its opening."""
        origins = (origin for result in self.results for origin in result.origins)
        return sum(origin is not Origin.TARGET for origin in origins) / len(self.rounds)

    def acceptance(self, num_draft_tokens: int) -> list[float]:
        """Returns by position how often a token was accepted, given that those before it were.

        A token that a shorter draft lacks counts as rejected.
        """
        counts = acceptance_by_position((r.num_accepted_tokens, num_draft_tokens) for r in self.rounds)
        return [each.accepted / each.reached if each.reached else 0.0 for each in counts]


def run_cases(
    decoder: Decoder, prompts: Sequence[Prompt], cases: Sequence[Case], num_new: int
) -> dict[Case, Sessions]:
    """Decodes every prompt in every case, in turns, after one short session of each to warm up."""
    sessions = {case: Sessions() for case in cases}
    for case in cases:
        decoder.decode(prompts[0].text, case, num_new=8)
    for number, prompt in enumerate(prompts):
        print(f"\rprompt {number + 1} of {len(prompts)}", end="", flush=True)
        shift = number % len(cases)
        for case in (*cases[shift:], *cases[:shift]):
            sessions[case].results.append(decoder.decode(prompt.text, case, num_new))
    print()
    return sessions


def warn_of_other_texts(name: str, found: Sequence[SessionResult], expected: Sequence[SessionResult]) -> None:
    """Prints a warning where texts differ from cloud-only's: ties of two tokens excuse few of them."""
    pairs = zip(found, expected, strict=True)
    if differing := sum(a.token_ids != b.token_ids for a, b in pairs):
        print(f"WARNING {name}: {differing} of {len(found)} texts differ from cloud-only")
