"""How many rounds may be under way at once. Pure."""

from __future__ import annotations

import enum

from outrider.edge_client.controller.mode_policy import ModeChoice, Way
from outrider.edge_client.core.stats import RoundRecord

MAX_UNDER_WAY = 16  # guesses included
MAX_UNANSWERED = 30  # rounds, dropped ones included: a verifier lets 32 of a session's requests wait


class Pipelining(enum.StrEnum):
    OFF = "off"  # one round at a time
    ON = "on"  # always several
    AUTO = "auto"  # while that is expected to be faster

    @property
    def ways(self) -> tuple[Way, ...]:
        match self:
            case Pipelining.OFF:
                return (Way.SYNCHRONOUS,)
            case Pipelining.ON:
                return (Way.PIPELINED,)
            case Pipelining.AUTO:
                return (Way.SYNCHRONOUS, Way.PIPELINED)


class RoundWindow:
    """`size` rounds; 1 is a synchronous edge, which waits for each verdict before it drafts on.

    Without a `choice` always `num_rounds`; with one as many as it says, or `num_rounds` while it pipelines.
    `may_guess`: rounds behind guesses at a rejection (`decode.branch_tree`) may be under way besides.
    """

    def __init__(
        self, num_rounds: int | None = None, choice: ModeChoice | None = None, may_guess: bool = False
    ) -> None:
        self.choice = choice
        self.may_guess = may_guess
        self._num_rounds = num_rounds
        self.size = 1
        self._resize()

    @property
    def has_guesses(self) -> bool:
        """Whether to guess now."""
        return self.may_guess and self.size > 1

    @property
    def most(self) -> int:
        """Rounds under way at most, guesses included."""
        return self._num_rounds or MAX_UNDER_WAY if self.has_guesses else self.size

    def observe(self, record: RoundRecord) -> None:
        if self.choice is not None:
            self.choice.observe(record)

    def choose(self, num_remaining: int) -> None:
        """Decides anew, where there is a choice."""
        if self.choice is not None:
            self.choice.choose(num_remaining)
            self._resize()

    def _resize(self) -> None:
        if self.choice is None:
            self.size = self._num_rounds or 1
        elif self.choice.current is Way.PIPELINED and self._num_rounds:
            self.size = self._num_rounds
        else:
            self.size = self.choice.window


def create_window(
    pipelining: Pipelining,
    num_rounds: int | None,
    policy: str,
    *,
    has_stream_too: bool = False,
    may_guess: bool = False,
) -> RoundWindow:
    """`policy`: the depth policy's name; `has_stream_too`: the target's own stream may be chosen (auto)."""
    ways = pipelining.ways
    if has_stream_too:
        ways = (*ways, Way.CLOUD_ONLY)
    if ways == (Way.SYNCHRONOUS,):
        return RoundWindow()
    may_guess = may_guess and Way.PIPELINED in ways
    choice = ModeChoice(ways, has_best_length=policy == "optimal", may_guess=may_guess)
    return RoundWindow(num_rounds, choice, may_guess)
