"""Decides how many rounds may be in flight at once. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.depth.registry import create_depth_policy
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.core.options import ExecutionMode, Pipelining
from outrider.edge_client.core.stats import RoundRecord

if TYPE_CHECKING:
    from outrider.edge_client.controller.mode_policy import ModePolicy

MAX_UNANSWERED = SETTINGS.max_unanswered


class RoundWindow:
    """Bounds the rounds in flight to `size`; 1 waits for each verdict before the next draft."""

    def __init__(
        self, num_rounds: int | None = None, policy: ModePolicy | None = None, may_branch: bool = False
    ) -> None:
        """Without a `policy` the size is always `num_rounds`; with one, what the policy wants, or
        `num_rounds` while it pipelines. `may_branch`: speculative branches (`decode.branch_tree`) may be in
        flight too."""
        self.policy = policy
        self.may_branch = may_branch
        self._num_rounds = num_rounds
        self.size = 1
        self._resize()

    @property
    def may_stream(self) -> bool:
        """Returns whether the policy may choose the target's own stream."""
        return self.policy is not None and self.policy.may_stream

    @property
    def is_to_stream(self) -> bool:
        """Returns whether the policy has chosen the target's own stream."""
        return self.policy is not None and self.policy.current is ExecutionMode.CLOUD_ONLY

    @property
    def is_branching(self) -> bool:
        """Returns whether speculative branches are to be sent now."""
        return self.may_branch and self.size > 1

    @property
    def max_rounds(self) -> int:
        """Returns the most rounds in flight, those on speculative branches included."""
        return self._num_rounds or SETTINGS.max_in_flight if self.is_branching else self.size

    def observe(self, record: RoundRecord) -> None:
        """Adds a round, answered or not."""
        if self.policy is not None:
            self.policy.observe(record)

    def prepare(self) -> None:
        """Lets the policy prepare its first decision, before an opening."""
        if self.policy is not None:
            self.policy.prepare()

    def choose(self, num_remaining: int) -> None:
        """Lets the policy decide, and resizes the window."""
        if self.policy is not None:
            self.policy.choose(num_remaining)
            self._resize()

    def _resize(self) -> None:
        if self.policy is None:
            self.size = self._num_rounds or 1
        elif self.policy.current is ExecutionMode.PIPELINED and self._num_rounds:
            self.size = self._num_rounds
        else:
            self.size = self.policy.window
        if self.policy is not None:
            self.policy.conditions.window = self.size


def create_window(
    pipelining: Pipelining,
    num_rounds: int | None,
    depth_policy: str,
    *,
    num_speculative_tokens: int | None = None,
    has_stream_too: bool = False,
    may_branch: bool = False,
    conditions: Conditions | None = None,
    has_trees: bool = False,
) -> RoundWindow:
    """Returns a new window for a depth policy by name that starts with `num_speculative_tokens`;
    `has_stream_too`: cloud-only may be chosen as well; `conditions`, `has_trees`: see `ModePolicy`."""
    modes = pipelining.modes
    if has_stream_too:
        modes = (*modes, ExecutionMode.CLOUD_ONLY)
    if modes == (ExecutionMode.SPECULATIVE,):
        return RoundWindow()
    may_branch = may_branch and ExecutionMode.PIPELINED in modes
    length = None
    if depth_policy != "optimal":
        length = create_depth_policy(depth_policy, num_speculative_tokens).next_depth()
    from outrider.edge_client.controller.mode_policy import ModePolicy  # imports numpy, which --help need not

    policy = ModePolicy(modes, length, conditions, has_trees=has_trees)
    return RoundWindow(num_rounds, policy, may_branch)
