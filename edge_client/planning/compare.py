"""Compares drafts with one verifier on the same texts: `plan`'s measuring and cost model, for several drafts at once.

The candidates run the same sessions in turn: prompt, seed and draft length. With the default method a session's text is
the same whatever drafts, so that they are judged on the same tokens. What is the target's or the link's is taken from
the sessions of all, so that candidates differ by their own acceptance and their own time alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.measure import (
    LENGTHS,
    NODES,
    MeasuredParts,
    Prompt,
    Samples,
    errands,
    parts_from,
    run_errand,
)
from outrider.edge_client.planning.plan import GIVEN, TREE, ModePlan, Plan, complete_parts, make_plan
from outrider.edge_client.planning.samples import Known, replay_rounds
from outrider.edge_client.session.factory import Edge

_FIRST_ERRANDS = (
    len(LENGTHS) + len(NODES) + 2
)  # every length, size of trees and streams once, whatever the time
CLOSE_SHARE = 0.03  # times nearer than that cannot be told apart on a calm machine: A/A of `make bench-pair`
LONGEST = min(
    NODES
)  # drafted tokens: a verification's time is a line over those measured, and turns beyond them
_NUM_RESAMPLES, _CLOSE_CHANCE = 200, 0.1  # of sessions, and how often another draft is the faster in them


@dataclass(frozen=True, slots=True)
class ComparedDraft:
    """Holds a candidate's plans by round trip in seconds; that of the link as measured comes first."""

    name: str
    plans: Mapping[float, Plan]

    @property
    def measured(self) -> Plan:
        """Returns the plan for the link as it was measured."""
        return next(iter(self.plans.values()))

    @property
    def tokens_per_round(self) -> float:
        """Returns the tokens of a round of the best chain on the link as measured."""
        length = self.measured.modes[ExecutionMode.SPECULATIVE].num_draft_tokens
        assert length is not None
        return self.measured.lengths[length - 1].tokens_per_round

    def best(self, rtt_s: float) -> ModePlan:
        """Returns the faster of chains and trees, one round at a time.

        Pipelining is left out: its prediction takes a long draft's acceptance, which the easy sessions have, and would
        prefer a draft whose sessions differ most.
        """
        modes = self.plans[rtt_s].modes
        return min((modes[name] for name in (ExecutionMode.SPECULATIVE, TREE) if name in modes), key=_token_s)

    def resampled_s(self, rtt_s: float, draws: Sequence[Sequence[float]]) -> list[float]:
        """Returns seconds a token as other sessions would have had them: for each of `draws`, numbers in [0, 1) that
        pick sessions, the time in proportion to the best chain's rounds for a token in those."""
        plan = self.plans[rtt_s]
        length = plan.modes[ExecutionMode.SPECULATIVE].num_draft_tokens
        assert length is not None
        sessions = []
        for sequence in plan.parts.sequences:
            rounds = list(replay_rounds([sequence], length))
            sessions.append((len(rounds), sum(num_accepted + 1 for num_accepted, _ in rounds)))
        token_s, usual = self.best(rtt_s).token_s, _rounds_per_token(sessions)
        picked = ([sessions[int(each * len(sessions))] for each in draw] for draw in draws)
        return [token_s * _rounds_per_token(each) / usual for each in picked]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Holds the candidates, and the round trips in seconds that they are compared at, the measured one first.

    `noise_share` is by how much times differ that should be the same: those of the target alone, measured in the turns
    of each candidate.
    """

    drafts: tuple[ComparedDraft, ...]
    rtts_s: tuple[float, ...]
    noise_share: float = 0.0

    def ranked(self, rtt_s: float) -> list[ComparedDraft]:
        """Returns the candidates, the fastest first."""
        return sorted(self.drafts, key=lambda each: each.best(rtt_s).token_s)

    def cloud_only(self, rtt_s: float) -> ModePlan:
        """Returns the target alone, streamed."""
        return self.drafts[0].plans[rtt_s].modes[ExecutionMode.CLOUD_ONLY]

    def recommended(self, rtt_s: float) -> ComparedDraft | None:
        """Returns the fastest candidate; None where the target alone is faster than all."""
        fastest = self.ranked(rtt_s)[0]
        return fastest if fastest.best(rtt_s).token_s < self.cloud_only(rtt_s).token_s else None

    def close_to(self, rtt_s: float) -> list[str]:
        """Returns the names of those that cannot be told apart from the fastest: their times are too near, or with some
        other choice of the same sessions they are the faster (a bootstrap, paired by session)."""
        fastest, *others = self.ranked(rtt_s)
        limit_s = fastest.best(rtt_s).token_s * (1 + max(CLOSE_SHARE, self.noise_share))
        return [
            each.name
            for each in others
            if each.best(rtt_s).token_s <= limit_s
            or self._chance_faster(each, fastest, rtt_s) >= _CLOSE_CHANCE
        ]

    def _chance_faster(self, draft: ComparedDraft, than: ComparedDraft, rtt_s: float) -> float:
        num_sessions = len(than.measured.parts.sequences)
        if not num_sessions or not draft.measured.parts.sequences:
            return 0.0
        chance = random.Random(0)
        draws = [[chance.random() for _ in range(num_sessions)] for _ in range(_NUM_RESAMPLES)]
        pairs = zip(draft.resampled_s(rtt_s, draws), than.resampled_s(rtt_s, draws), strict=True)
        return sum(ours < theirs for ours, theirs in pairs) / _NUM_RESAMPLES


def _token_s(mode: ModePlan) -> float:
    return mode.token_s


def _rounds_per_token(sessions: Sequence[tuple[int, int]]) -> float:
    """Of sessions of (rounds, tokens)."""
    return sum(num_rounds for num_rounds, _ in sessions) / sum(num_tokens for _, num_tokens in sessions)


def measure_drafts(
    edges: Mapping[str, Edge],
    *,
    prompts: Sequence[Prompt],
    seconds: float,
    on_progress: Callable[[float, str], None] = lambda share, name: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Samples]:
    """Returns what `seconds` of sessions for each candidate measured, session by session in turn. Raises what a session
    raises."""
    samples = {name: Samples(method=edge.config.verification.method) for name, edge in edges.items()}
    todo = {
        name: errands(edge.config, prompts, seconds, samples[name], has_sources=False)
        for name, edge in edges.items()
    }
    begin_s, total_s = clock(), seconds * len(edges)
    for number in count():
        if number >= _FIRST_ERRANDS and clock() - begin_s >= total_s:
            return samples
        for name, edge in edges.items():
            on_progress(min(1.0, (clock() - begin_s) / total_s), name)
            run_errand(edge, next(todo[name]), samples[name])
    raise AssertionError("errands never end")


def compare(samples: Mapping[str, Samples], rtts_s: Sequence[float]) -> Comparison:
    """Returns the comparison on the link as measured and at other round trips. Raises `UsageError` naming `--measure-s`
    where too little was measured."""
    common, own = (
        parts_from(_together(samples.values())),
        {name: parts_from(each) for name, each in samples.items()},
    )
    rtts = (common.rtt, *(Known(rtt_s, GIVEN) for rtt_s in rtts_s))
    drafts = tuple(
        ComparedDraft(name, {rtt.value: _plan(each, common, rtt) for rtt in rtts})
        for name, each in own.items()
    )
    alone_s = [each.target_token.value for each in own.values()]
    return Comparison(
        drafts, tuple(dict.fromkeys(rtt.value for rtt in rtts)), max(alone_s) / min(alone_s) - 1
    )


def _together(samples: Iterable[Samples]) -> Samples:
    found = Samples()
    for each in samples:
        found.rounds += each.rounds
        found.sessions += each.sessions
        found.token_gaps_s += each.token_gaps_s
    return found


def _plan(own: MeasuredParts, common: MeasuredParts, rtt: Known) -> Plan:
    parts = complete_parts(
        draft_token=own.draft_token,
        draft_fixed=own.draft_fixed,
        acceptance=own.acceptance,
        sequences=own.sequences,
        tree_base=own.tree_base,
        tree_node=own.tree_node,
        target_token=common.target_token,
        verify_fixed=common.verify_fixed,
        verify_token=common.verify_token,
        rtt=rtt,
        method=own.method,
    )
    return make_plan(parts, LONGEST)
