"""The options of one generation."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from outrider.common.methods import DEFAULT_SUPPORT_SIZE
from outrider.common.types import Method, MethodParams, SamplingParams, StopParams
from outrider.edge_client.drafting.trees import TreeBudget


class ExecutionMode(enum.StrEnum):
    """Names where tokens are drafted and verified, in settings, plans and the choice that `auto` makes."""

    SPECULATIVE = "speculative"  # the edge drafts a round, the verifier judges it, one at a time
    PIPELINED = "pipelined"  # the same, with rounds sent before the verdicts of earlier ones
    CLOUD_ONLY = "cloud-only"  # the target alone, streamed
    CO_LOCATED = "co-located"  # draft and target both in the verifier, streamed
    EDGE_ONLY = "edge-only"  # the draft alone, unverified
    AUTO = "auto"  # speculative, pipelined or cloud-only, whichever is expected to be the fastest

    @property
    def has_draft(self) -> bool:
        """Returns whether the edge drafts."""
        return self not in (ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED)

    @property
    def has_rounds(self) -> bool:
        """Returns whether the edge may send rounds of drafted tokens."""
        return self.has_draft and self is not ExecutionMode.EDGE_ONLY


# What `--mode` takes: whether speculative rounds are pipelined is a setting of its own (`--pipeline`).
REQUESTABLE_MODES = tuple(mode for mode in ExecutionMode if mode is not ExecutionMode.PIPELINED)
MODES_WITH_ROUNDS = tuple(mode for mode in REQUESTABLE_MODES if mode.has_rounds)


class Pipelining(enum.StrEnum):
    """Names when several rounds are in flight."""

    OFF = "off"  # one round at a time
    ON = "on"  # always several
    AUTO = "auto"  # while that is expected to be faster

    @property
    def modes(self) -> tuple[ExecutionMode, ...]:
        """Returns the modes of rounds that it allows."""
        match self:
            case Pipelining.OFF:
                return (ExecutionMode.SPECULATIVE,)
            case Pipelining.ON:
                return (ExecutionMode.PIPELINED,)
            case Pipelining.AUTO:
                return (ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED)


class OnTimeout(enum.StrEnum):
    """The policy for a round that is not answered in time."""

    FIRST_TOKEN = "first_token"  # keep the draft's first token, marked
    EDGE_ONLY = "edge_only"  # draft alone until the link is back
    WAIT = "wait"  # exact: wait and resend
    FAIL = "fail"  # end with an error


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Everything that the user chooses of a generation, but for its parts' construction."""

    mode: ExecutionMode = ExecutionMode.SPECULATIVE
    draft_source: str = ""  # of the verifier, in mode co-located; empty: its draft
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopParams = field(default_factory=StopParams)
    method: Method = Method.COUPLED
    method_params: MethodParams = field(default_factory=MethodParams)
    support_size: int = DEFAULT_SUPPORT_SIZE  # ids that a drafted token's distribution is sent with
    num_logprobs: int = 0  # most probable ids with each token's log-probabilities; 0: none are asked for
    on_timeout: OnTimeout = OnTimeout.FIRST_TOKEN
    recover_timeout_s: float = 60.0
    is_reverified: bool = False  # unverified tokens are judged later, and rolled back where they are wrong
    is_target_change_allowed: bool = False
    tokenizer_fingerprint: str = ""
    tree: TreeBudget | None = None  # that rounds draft in place of a chain
    adapts_trees: bool = False  # within `tree`, by measured times; a chain where that is faster
