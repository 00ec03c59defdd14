"""Rounds under way in virtual time: what of each is right, and when the verifier answers it. Pure.

What is right is told by an acceptance trace: a draft that began behind token p of the text is right for
`runs[p]` tokens, and under `coupled` one that goes on over round borders, all of it standing, is one such
draft. Behind a guess another one begins; a guess is right where the trace's `seconds` say so. Gaps of tokens
that nobody judges are those of another place of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.common.types import RunnerUp
from outrider.edge_client.decode.branch_tree import Branch
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, TextTrace

WRONG, RIGHT = 1, 2  # token ids: of a runner-up that is not the target's token, and of one that is
_STRIDE = 7919  # to that other place


@dataclass(slots=True)
class Run:
    """A draft that goes on and on: right from `anchor` to `end`, as indices into the text."""

    anchor: int
    end: int


@dataclass(slots=True, eq=False)
class Sent:
    """A round under way. `is_judged`: it will be, what it assumes being right; else it is stale."""

    first: int  # of its draft, as an index into the text
    length: int
    num_right: int  # of its tokens, all before it standing
    is_judged: bool
    run: Run
    runner_ups: tuple[RunnerUp, ...]
    behind: Branch[Sent] | None
    history: list[object] = field(repr=False)  # names of the tokens before its draft ...
    ids: list[object] = field(repr=False)  # ... and in it: the text's by their index
    chance: float
    draft_s: float
    sent_s: float
    window: int
    was_ahead: bool  # of verdicts, when it was sent
    is_guess_hit: bool = False
    start_s: float = 0.0
    verified_s: float = 0.0
    arrives_s: float = 0.0

    @property
    def is_guess(self) -> bool:
        return self.behind is not None and (self.behind.guess is not None or self.behind.host.is_guess)

    @property
    def is_ahead(self) -> bool:
        """Behind all of another one, whose bonus its first token is checked against."""
        return self.behind is not None and self.behind.guess is None

    @property
    def is_whole(self) -> bool:
        return self.is_judged and self.num_right == self.length


def start_of(branch: Branch[Sent]) -> int:
    return branch.host.first + branch.place + (branch.guess is not None)


def is_right(branch: Branch[Sent]) -> bool:
    """Whether what it assumes comes true."""
    host = branch.host
    if branch.guess is None:
        return host.is_whole
    return host.is_judged and host.num_right == branch.place and branch.guess == RIGHT


def path_of(branch: Branch[Sent]) -> list[Branch[Sent]]:
    """From the oldest round on."""
    path = [branch]
    while path[-1].host.behind is not None:
        path.append(path[-1].host.behind)
    return path[::-1]


class Truth:
    """What a trace says of drafts."""

    def __init__(self, trace: TextTrace) -> None:
        self._trace = trace
        self._num_seen = 0

    def run_from(self, first: int) -> Run:
        return Run(first, first + int(self._trace.runs[first]))

    def num_right(self, run: Run, first: int, length: int) -> int:
        """Of a draft of `length` tokens from `first` on that goes on with what `run` began."""
        last = min(first + length, self._trace.num_positions)
        while run.end == run.anchor + MAX_DEPTH < last:
            run.anchor, run.end = run.end, run.end + int(self._trace.runs[run.end])
        return min(max(0, run.end - first), length)

    def runner_ups(self, first: int, length: int, num_judged: int) -> tuple[RunnerUp, ...]:
        """None where the trace has none."""
        gaps, seconds, runs = self._trace.gaps, self._trace.seconds, self._trace.runs
        if gaps is None or seconds is None:
            return ()
        told = []
        for number in range(length):
            where = first + number
            self._num_seen += 1
            if number < num_judged and where < len(runs):
                has_second = runs[where] == 0 and seconds[where]
                told.append(RunnerUp(RIGHT if has_second else WRONG, float(gaps[where])))
            else:
                told.append(RunnerUp(WRONG, float(gaps[(where + _STRIDE * self._num_seen) % len(gaps)])))
        return tuple(told)
