"""Depth policies in virtual time: recorded or synthetic acceptance, by the cost model's clock. Deterministic.

A policy sees what it would see in a session, a `RoundRecord` a round; rounds take what the cost model says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.edge_client.controller.cost_model import LinkCosts, ModelCosts, round_s
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.base import Stop
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, TextTrace, signals_of

_ANY_TOKEN = 0  # depth policies ask for confidences alone
LinkAt = Callable[[int], LinkCosts]  # by the round's number


@dataclass(frozen=True, slots=True)
class VirtualRound:
    num_draft_tokens: int  # after the text's end and the early stop
    num_accepted_tokens: int
    total_s: float


def replay(text: TextTrace, policy: DepthPolicy, models: ModelCosts, link_at: LinkAt) -> list[VirtualRound]:
    """One text, whose first token came with the opening, by a policy that starts with it."""
    rounds: list[VirtualRound] = []
    position = 0
    while position < text.num_positions:
        most = min(policy.next_depth(), text.num_positions - position - 1, MAX_DEPTH)
        confidences = text.confidences[position, :most].tolist()
        num_drafted = _num_drafted(most, confidences, policy)
        num_accepted = min(int(text.runs[position]), num_drafted)
        link = link_at(len(rounds))
        record = _make_record(len(rounds) + 1, num_drafted, num_accepted, models, link, confidences)
        policy.observe(record)
        rounds.append(VirtualRound(num_drafted, num_accepted, round_s(num_drafted, models, link)))
        position += num_accepted + 1
    return rounds


def ms_per_token(rounds: Sequence[VirtualRound]) -> float:
    num_tokens = sum(r.num_accepted_tokens + 1 for r in rounds)
    return 1e3 * sum(r.total_s for r in rounds) / num_tokens


def _num_drafted(most: int, confidences: list[float], policy: DepthPolicy) -> int:
    """How many tokens are drafted until the policy's stop rule ends the draft."""
    should_stop = policy.stop_rule()
    if should_stop is None:
        return most
    for number in range(1, most):
        signals = signals_of(confidences[number - 1]) if confidences else None
        if should_stop(_ANY_TOKEN, signals, number) is not Stop.NO:
            return number
    return most


def _make_record(
    round_id: int,
    num_drafted: int,
    num_accepted: int,
    models: ModelCosts,
    link: LinkCosts,
    confidences: list[float],
) -> RoundRecord:
    verifier_ms = 1e3 * models.verify_s(num_drafted)
    net_ms = 1e3 * (link.rtt_s + link.transfer_s(num_drafted))
    return RoundRecord(
        round_id=round_id,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        draft_ms=1e3 * num_drafted * models.draft_token_s,
        rtt_ms=net_ms + verifier_ms,
        net_ms=net_ms,
        forward_ms=verifier_ms,
        verifier_ms=verifier_ms,
        batch_size=1,
        confidences=tuple(confidences[:num_drafted]),
    )
