"""A point in virtual time: the simulator with the pair's recorded acceptance and times."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.controller.bank import COMMIT_MS, NUM_BEFORE, NUM_PROMPT_TOKENS, SEND_MS, bank
from benchmarks.controller.simulated import Place, play_edges
from benchmarks.controller.ways import total_of
from benchmarks.real.cases import RealCase
from benchmarks.real.points import RealPoint


def virtual_ms(point: RealPoint, cases: Sequence[RealCase]) -> dict[str, float]:
    """Returns the milliseconds a token of each case, over the pair's recorded texts."""
    return {case.name: round(_play(point, case), 3) for case in cases}


def _play(point: RealPoint, case: RealCase) -> float:
    texts = bank()[point.traces].texts
    num_before = 0 if point.is_first else NUM_BEFORE
    orders = [
        [texts[(place + number) % len(texts)] for number in range(num_before + 1)]
        for place in range(len(texts))
    ]
    played = play_edges(
        orders,
        _place(point),
        case.settings,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        num_tokens=point.num_tokens,
    )
    return total_of([each[-1] for each in played]).tpot_ms


def _place(point: RealPoint) -> Place:
    """Returns what the point's parts take, stretched as the flags stretch them."""
    times = bank()[point.traces].times
    assert times is not None, "the bank's traces have times"
    verifier, draft = dict(times["verifier"]), dict(times["draft"])
    if point.min_forward_ms:
        verifier = {"step_ms": point.min_forward_ms}
    if point.min_draft_ms:
        draft["token_ms"] = point.min_draft_ms
    own = {"send_ms": SEND_MS, "receive_ms": SEND_MS}
    return Place(point.rtt_ms, verifier | own, draft, own | {"commit_ms": COMMIT_MS})
