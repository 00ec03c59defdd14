"""What it would bring to send, beside pipelined rounds, guesses at what follows a rejection. Synthetic.

    python -m experiments.virtual_alternatives

With `coupled` the edge knows the noise: where its token falls, the verifier's is its own second choice with a
chance `second`. Behind each round the edge could draft, for some places of that round, the second choice and
what follows it, and send that too: a verifier that rejects just there goes on without a trip. It costs the
edge `length` draft tokens a place, and what is drafted meanwhile is not the main text's.

A renewal process by chance, one rejection after the other, with the timing of `costmodel_pipelined`: runs end
with a rejection; a guess that came true is a first round that is there already.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.command import run_command

ALPHA, FORWARD_MS = 0.8, 30.0
SECOND = 0.5  # of the embedded pair: .64 at temperature 0.8, .51 at 0
NUM_RUNS = 6_000
MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_places` guesses a round, from its first place on, each of `guess_length` tokens; 0: none."""

    length: int
    num_places: int = 0
    guess_length: int = 0


def tpot_ms(rtt_ms: float, draft_ms: float, plan: Plan, second: float = SECOND, seed: int = 1) -> float:
    """Milliseconds a token over NUM_RUNS runs."""
    chance = random.Random(seed)
    total_ms, num_tokens, is_guessed = 0.0, 0, False
    for _ in range(NUM_RUNS):
        run_ms, tokens, is_guessed = _run(chance, rtt_ms, draft_ms, plan, second, is_guessed)
        total_ms, num_tokens = total_ms + run_ms, num_tokens + tokens
    return total_ms / num_tokens


def _run(
    chance: random.Random, rtt_ms: float, draft_ms: float, plan: Plan, second: float, is_guessed: bool
) -> tuple[float, int, bool]:
    """From one rejection's verdict to the next: time, tokens, whether what follows was guessed and sent."""
    num_right = 0
    while chance.random() < ALPHA:
        num_right += 1
    verified_ms, now_ms, first = 0.0, 0.0, 0  # at the verifier, at the edge; of this round
    if is_guessed:  # its first token is the correction itself: that one stands
        verified_ms, first = FORWARD_MS - rtt_ms / 2, plan.guess_length - 1
        if num_right < first or first == 0:
            return FORWARD_MS, min(num_right, first) + 1, False
    for _ in range(MAX_ROUNDS):
        now_ms += plan.length * draft_ms
        verified_ms = max(verified_ms, now_ms + rtt_ms / 2) + FORWARD_MS
        guesses_ms = plan.num_places * plan.guess_length * draft_ms
        place = num_right - first
        if place < plan.length:
            are_sent = place < plan.num_places and now_ms + (place + 1) * plan.guess_length * draft_ms
            is_in_time = bool(are_sent) and are_sent <= verified_ms - rtt_ms / 2
            return verified_ms + rtt_ms / 2, num_right + 1, is_in_time and chance.random() < second
        first += plan.length
        now_ms += guesses_ms
    return verified_ms + rtt_ms / 2, num_right + 1, False


def best(rtt_ms: float, draft_ms: float, *, has_guesses: bool) -> tuple[float, Plan]:
    plans = [Plan(n) for n in (1, 2, 3, 4, 6, 8, 10, 14)]
    if has_guesses:
        places = [(p.length, k) for p in plans for k in (1, 2, 3, 5, 8) if k <= p.length]
        plans = [Plan(length, k, m) for length, k in places for m in (2, 4, 8)]
    return min(((tpot_ms(rtt_ms, draft_ms, plan), plan) for plan in plans), key=lambda found: found[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.virtual_alternatives", description=__doc__)
    parser.parse_args(argv)
    for rtt_ms in (60.0, 200.0):
        for draft_ms in (12.0, 2.0, 0.25):
            alone, plan = best(rtt_ms, draft_ms, has_guesses=False)
            beside, guesses = best(rtt_ms, draft_ms, has_guesses=True)
            print(
                f"RTT {rtt_ms:g} draft {draft_ms:g} ms: without {alone:.1f} (rounds of {plan.length}), with "
                f"{beside:.1f} ms a token (rounds of {guesses.length}, {guesses.num_places} guesses of "
                f"{guesses.guess_length}): {beside / alone:.3f}"
            )
    return 0


if __name__ == "__main__":
    run_command("virtual_alternatives", main)
