"""The points at which policies are judged: pairs of the bank, texts and links, drawn by a seed. Pure.

Every block of 24 points has each pair twice (the useless draft four times), each length and temperature eight
times, and nine points on loopback: a smaller number of points is the beginning of a larger one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from outrider.common.errors import UsageError
from outrider.training.bank.pairs import BANK, PROMPT_LOOKUP

SEED = 19
BLOCK = 24
USELESS = ("embedded", "random")
PAIRS = (*((target.name, draft.name) for target in BANK for draft in target.drafts), USELESS)
TEMPERATURES = (0.0, 0.7, 1.0)
LENGTHS = (32, 100, 400)
RTTS_MS = (0.0, 0.0, 0.0, 1.0, 10.0, 30.0, 80.0, 200.0)
STRETCHES_MS = ((0.0, 0.0), (0.0, 0.0), (30.0, 2.0), (30.0, 12.0), (70.0, 2.0), (70.0, 12.0))
MAX_LONG_FORWARD_MS = 30.0  # of the longest texts: one of 400 tokens would take half a minute with 70

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class RealPoint:
    """Describes a pair, a text and a link. Forwards and drafted tokens are stretched to stated times (0: not)."""

    number: int
    target: str
    draft: str
    temperature: float
    num_tokens: int
    rtt_ms: float
    min_forward_ms: float
    min_draft_ms: float
    is_first: bool  # each text is the first of a process, as far as the controller knows

    @property
    def is_near(self) -> bool:
        """Returns whether edge and verifier are on loopback."""
        return self.rtt_ms == 0

    @property
    def traces(self) -> str:
        """Returns the name of the pair's recorded acceptance."""
        return f"{self.target}/{self.draft} T={self.temperature:g}"

    def __str__(self) -> str:
        stretch = f", forward {self.min_forward_ms:g} ms" if self.min_forward_ms else ""
        stretch += f", draft {self.min_draft_ms:g} ms" if self.min_draft_ms else ""
        which = "first" if self.is_first else "later"
        return f"{self.traces}, {which} texts of {self.num_tokens}, RTT {self.rtt_ms:g} ms{stretch}"


def draw_points(num_points: int, seed: int = SEED) -> list[RealPoint]:
    """Returns the first points of a seed, numbered from 1."""
    return list(islice(_blocks(random.Random(f"points {seed}")), num_points))


def _blocks(source: random.Random) -> Iterator[RealPoint]:
    number = 1
    while True:
        columns = (
            _column(PAIRS, source),
            _column(TEMPERATURES, source),
            _column(LENGTHS, source),
            _column(RTTS_MS, source),
            _column(STRETCHES_MS, source),
            _column((True, False), source),
        )
        for (target, draft), temperature, length, rtt_ms, stretch, is_first in zip(*columns, strict=True):
            forward_ms, draft_ms = stretch if rtt_ms else (0.0, 0.0)
            if length == max(LENGTHS):
                forward_ms = min(forward_ms, MAX_LONG_FORWARD_MS)
            if draft == PROMPT_LOOKUP:
                draft_ms = 0.0  # copying takes no time on any machine
            yield RealPoint(
                number, target, draft, temperature, length, rtt_ms, forward_ms, draft_ms, is_first
            )
            number += 1


def _column(values: Sequence[ValueT], source: random.Random) -> list[ValueT]:
    """Returns a block's values of one property: each as often as the others, in a random order."""
    found = [values[i % len(values)] for i in range(BLOCK)]
    source.shuffle(found)
    return found


@dataclass(frozen=True, slots=True)
class PointOptions:
    """Says which points are measured: the first `num_points`, and of them only `numbers` where there are any, the
    others staying as they were measured before."""

    num_points: int = BLOCK
    numbers: tuple[int, ...] = ()


def parse_numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of `3,5-8`. Raises `UsageError` naming `--at`."""
    found: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UsageError(f"--at {text}: want numbers of points from 1 on, for example 3,5-8") from None
    if found and min(found) < 1:
        raise UsageError(f"--at {text}: points are numbered from 1")
    return tuple(found)
