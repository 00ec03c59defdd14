"""One generation in progress: its tokens, its two sides, and the transitions that change its state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.common.clock import SYSTEM_CLOCK, Clock
from outrider.common.errors import RoundFailedError
from outrider.common.sampling.processors import is_plain
from outrider.common.sampling.support import choose_candidate
from outrider.common.types import (
    Candidate,
    FinishReason,
    Method,
    ModelInfo,
    Opened,
    Origin,
    RoundError,
    RoundErrorCode,
    Support,
    TokenLogprobs,
)
from outrider.edge_client.controller.acceptance_prior import AcceptancePrior, PriorKey
from outrider.edge_client.controller.conditions import Conditions
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.controller.tree_policy import TreePolicy
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import RolledBackEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode, SessionOptions
from outrider.edge_client.decode.proposer import Proposer
from outrider.edge_client.decode.recorder import Recorder
from outrider.edge_client.decode.token_buffer import TokenBuffer
from outrider.edge_client.drafting.learned.learner import Learner, num_bytes
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

log = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingCorrection:
    """A rejected draft token whose correction is still to be chosen. It stays pending until the sequence
    grows, whatever happens to the link meanwhile: another token of the target's in its place would be a
    sample of p, not of the residual.
    """

    position: int  # of the token to choose: the length of the sequence
    support: Support  # what the rejected token was sampled from
    num_seen: int = 0

    def choose(self, candidates: Sequence[Candidate], seed: int) -> int | None:
        """Returns the first of the next candidates that passes; None: more must be asked for."""
        token_id = choose_candidate(self.support, candidates, seed, self.position, self.num_seen)
        self.num_seen += len(candidates)
        return token_id


_MAX_REPAIRS = 3
# Tokens of a sequence whose target has not answered yet: the contexts of today's models, and an end for a draft that
# copies without one.
_MAX_UNKNOWN_CONTEXT_TOKENS = 131_072


class GenerationState:
    """The state of one generation. Its parts are public and never replaced; what changes is private, is read
    through properties and changes through the methods under "transitions"."""

    def __init__(
        self,
        session_id: bytes,
        options: SessionOptions,
        tokens: TokenBuffer,
        proposer: Proposer,
        *,
        verifier: RemoteVerifier | None = None,
        window: RoundWindow | None = None,
        conditions: Conditions | None = None,
        acceptance_prior: AcceptancePrior | None = None,
        head_learner: Learner | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.session_id: Final = session_id
        self.options: Final = options
        self.tokens: Final = tokens
        self.proposer: Final = proposer
        self.verifier: Final = verifier
        self.window: Final = window or RoundWindow()
        shared = conditions  # by policies; None: each observes rounds for itself
        if (choice := self.window.policy) is not None:
            conditions = choice.conditions
        self.conditions: Final = conditions  # that an opening and earlier generations tell of
        # With `--tree auto`, by the conditions that are observed.
        self.tree_policy: Final = None if shared is None or not options.adapts_trees else TreePolicy(shared)
        self.recorder: Final = Recorder(proposer.depth, self.window, shared, self.tree_policy)
        self.clock: Final = clock
        self._acceptance_prior = acceptance_prior  # of other generations
        self.head_learner = head_learner  # with --learn
        # Those that `recall` and `remember` are about: with `coupled` alone, as other methods accept less.
        self._remembered_conditions = conditions if options.method is Method.COUPLED else None
        self._model: ModelInfo | None = None
        self._must_open = True
        self._pending: PendingCorrection | None = None
        self._failures: list[RoundError] = []  # since the last answer that was applied, on one connection
        self._failed_after_reconnects = 0  # which connection that is
        self._has_given_up = False  # on the verdict for the unverified tokens of a finished sequence
        self._unjudged_since_s: float | None = None  # when such a verdict first failed to come

    # ------------------------------------------------------------------------------------- reading

    @property
    def remote(self) -> RemoteVerifier:
        """Returns the verifier, in a mode that has one."""
        assert self.verifier is not None, "this mode has no verifier"
        return self.verifier

    @property
    def model(self) -> ModelInfo | None:
        """Returns the target; None until the verifier answered an opening."""
        return self._model

    @property
    def must_open(self) -> bool:
        """Returns whether the verifier has no session, or not with this sequence."""
        return self._must_open

    @property
    def pending(self) -> PendingCorrection | None:
        """Returns the correction that is still to be chosen among candidates."""
        return self._pending

    @property
    def has_pending_reverification(self) -> bool:
        """Returns whether tokens that were kept unverified are still to be judged."""
        tokens = self.tokens
        return tokens.is_reverified and not self._has_given_up and tokens.settled_position < tokens.position

    @property
    def is_over(self) -> bool:
        """Returns whether nothing is left to generate or to judge."""
        return self.tokens.finish is not None and not self.has_pending_reverification

    @property
    def is_to_stream(self) -> bool:
        """Returns whether the mode policy has chosen the target's own stream."""
        return self.window.is_to_stream

    @property
    def context_room(self) -> int:
        """Returns how many more tokens the target's context takes."""
        if self._model is None:
            return max(0, min(self.tokens.num_remaining, _MAX_UNKNOWN_CONTEXT_TOKENS - self.tokens.position))
        return max(0, self._model.limits.max_context - self.tokens.position)

    def note_mode(self) -> None:
        """Records the mode that makes the next tokens: the one given, or the policy's choice."""
        policy, mode = self.window.policy, self.options.mode
        if policy is not None and mode.has_rounds:
            self.recorder.in_mode(policy.current, len(self.tokens.origins), policy.reason, policy.expected_ms)
        else:
            made = ExecutionMode.SPECULATIVE if mode is ExecutionMode.AUTO else mode
            self.recorder.in_mode(made, len(self.tokens.origins), "given", {})

    def num_to_draft(self, num_assumed: int = 0) -> int:
        """Returns the next round's depth after `num_assumed` tokens that are not certain yet: within
        `max_new_tokens`, the context and the verifier's limit."""
        if self.tokens.finish is not None:
            return 0
        room = min(self.tokens.num_remaining, self.context_room) - num_assumed - 1
        return max(0, min(self.next_depth(num_assumed), room))

    @property
    def num_colocated_nodes(self) -> int:
        """Returns the nodes of the trees that a co-located draft is asked for; 0: chains."""
        if self.options.tree is None or self._model is None:
            return 0
        return min(self.options.tree.num_nodes, self._model.limits.max_tree_nodes)

    def plan_draft(self) -> None:
        """Has the policies decide what the next rounds draft, by what was observed so far."""
        budget, policy = self.options.tree, self.tree_policy
        if budget is not None and policy is not None and self._model is not None:
            policy.plan(min(budget.num_nodes, self._model.limits.max_tree_nodes))
        self.next_depth()

    def next_depth(self, num_assumed: int = 0) -> int:
        """Returns the depth policy's depth after so many assumed tokens, or the verifier's limit."""
        wanted = self.proposer.depth.next_depth(num_assumed)
        return wanted if self._model is None else min(wanted, self._model.limits.max_draft_tokens)

    def tree_budget(self, num_assumed: int = 0) -> TreeBudget | None:
        """Returns the bounds of the next round's tree; None where it is a chain: without `--tree`, or where the
        verifier takes none. Its paths are no longer than a chain may be, which it is where it has one leaf."""
        budget, drafter = self.options.tree, self.proposer.drafter
        if budget is None or self._model is None or self.tokens.finish is not None:
            return None
        if drafter is None or not drafter.can_propose_trees:
            return None
        limits = self._model.limits
        num_nodes = min(budget.num_nodes, limits.max_tree_nodes, self.context_room - num_assumed - 1)
        longest = min(self.tokens.num_remaining - num_assumed - 1, num_nodes, limits.max_draft_tokens)
        depth, copied = min(budget.max_depth, longest), min(budget.max_copied_depth, longest)
        if depth <= 0:
            return None
        policy = self.tree_policy
        if policy is not None and (policy.costs is None or self.window.size > 1):
            return None
        costs = None if policy is None else policy.costs
        return replace(budget, num_nodes=num_nodes, max_depth=depth, max_copied_depth=copied, costs=costs)

    # --------------------------------------------------------------------------------- transitions

    def add(
        self,
        token_ids: tuple[int, ...],
        origins: tuple[Origin, ...],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> list[TokenEvent]:
        """Appends tokens; `logprobs` are those of the first ones, as far as they are known."""
        events = self.tokens.add(token_ids, origins, logprobs)
        if not self.options.method.is_exact:
            method = self.options.method
            events = [replace(e, approximation=method) if e.origin.is_judged else e for e in events]
        self.recorder.stats.token_times_ns += [event.time_ns for event in events]
        if events:
            self._pending = None
        return events

    def roll_back(self, position: int) -> RolledBackEvent:
        """Drops the tokens from `position` on, also from the draft's cache."""
        num_dropped = self.tokens.position - position
        event = self.tokens.roll_back(position)
        self.recorder.rolled_back(num_dropped, event.num_tokens)
        if self.proposer.drafter is not None:
            self.proposer.drafter.roll_back(position)
        return event

    def choose_correction(self, support: Support | None, candidates: Sequence[Candidate]) -> list[TokenEvent]:
        """Appends the correction, if one of the candidates passes. `support` is what the rejected token was
        sampled from, for the first candidates. It has no log-probabilities, and is sent with the next round."""
        if self._pending is None:
            assert support is not None
            self._pending = PendingCorrection(self.tokens.position, support)
        token_id = self._pending.choose(candidates, self.options.sampling.seed)
        return [] if token_id is None else self.add((token_id,), (Origin.CORRECTION,))

    def finish(self, reason: FinishReason) -> None:
        """Ends the sequence for a reason other than its last token."""
        self.tokens.finish = reason

    def finish_if_full(self) -> None:
        """Ends a sequence that fills the target's context."""
        if self.tokens.finish is None and not self.context_room:
            self.finish(FinishReason.CONTEXT)

    def cancelled(self) -> None:
        """Takes the end of a sequence back whose unverified tokens will not be judged any more."""
        if self.has_pending_reverification:
            self.tokens.finish = None

    def opened(self, opened: Opened) -> list[RolledBackEvent]:
        """Notes that the verifier has the session. Tokens that were kept before anybody knew that they would
        end the sequence are dropped: only the target may end it."""
        self._model = opened.model
        if self.head_learner is not None:
            self.head_learner.meet(opened.model.target_fingerprint)
        self._must_open = False
        position = self.tokens.set_eos(opened.model.eos_token_ids)
        return [] if position is None else [self.roll_back(position)]

    def lost(self) -> None:
        """Notes that the verifier has no session, or not with this sequence."""
        self._must_open = True

    def answered(self) -> None:
        """Notes an answer that was applied: the repairs before it do not count any more."""
        self._failures.clear()

    def failed(self, error: RoundError) -> None:
        """Counts a repair. Raises `RoundFailedError` for the verifier's second bug or a fourth repair on one
        connection: a verifier that is restarted again and again forgets the session each time."""
        log.warning("repairing the session: %s: %s", error.code, error.message)
        if self.remote.num_reconnects != self._failed_after_reconnects:
            self._failed_after_reconnects = self.remote.num_reconnects
            self._failures.clear()
        self._failures.append(error)
        num_internal = sum(each.code is RoundErrorCode.INTERNAL for each in self._failures)
        if num_internal > 1 or len(self._failures) > _MAX_REPAIRS:
            raise RoundFailedError(error)

    def rewind(self, error: RoundError) -> None:
        """Continues from the verifier's position in `error` if its sequence is a prefix of this one, and not
        from the same position twice; else the session must be opened again."""
        tokens = self.tokens
        position = min(error.position, tokens.settled_position)
        is_prefix = error.position >= tokens.num_prompt_tokens and tokens.chain.agrees(
            error.position, error.hash
        )
        # Candidates are asked for at the end of the whole sequence.
        if self._pending is None and is_prefix and position != tokens.acked_position:
            tokens.acknowledge(position)
        else:
            self._must_open = True

    def missed_reverification(self) -> None:
        """Notes that nothing is left to do but to ask again for a verdict on unverified tokens, and gives up
        after `recover_timeout_s` of silence since the sequence ended."""
        now_s = self.clock.now()
        if self._unjudged_since_s is None:
            self._unjudged_since_s = now_s
        silent_for_s = min(self.remote.silent_for_s, now_s - self._unjudged_since_s)
        if silent_for_s > self.options.recover_timeout_s:
            num_left = len(self.tokens.to_judge)
            log.warning("%d tokens stay unverified: silent for %.0f s", num_left, silent_for_s)
            self._has_given_up = True

    def learn(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Lets the draft's head learn from the target's log-probabilities of the tokens from `start` on."""
        if self.head_learner is None or not logprobs:
            return
        self.head_learner.learn(self.tokens.chain.token_ids, start, logprobs)
        stats = self.recorder.stats
        stats.num_learned_tokens += len(logprobs)
        stats.learn_bytes_down += num_bytes(logprobs)

    # --------------------------------------------------------------- acceptance between generations

    def recall_times(self) -> None:
        """Lets the policies start with the times of earlier generations."""
        prior, conditions = self._acceptance_prior, self._remembered_conditions
        if prior is not None and conditions is not None:
            prior.start_times(conditions)

    def recall_acceptance(self, model: ModelInfo) -> None:
        """Lets the policies start with the acceptance of earlier generations."""
        prior, conditions = self._acceptance_prior, self._remembered_conditions
        if prior is not None and conditions is not None:
            prior.start_acceptance(self._prior_key(model), conditions)

    @property
    def num_prompt_choices(self) -> int:
        """Returns in how many places of the prompt the opening is to compare draft and target: where little is known
        of the two, and a token depends on its distribution alone."""
        prior, drafter, sampling = self._acceptance_prior, self.proposer.drafter, self.options.sampling
        if (
            self._remembered_conditions is None
            or drafter is None
            or not drafter.can_propose_along
            or not is_plain(sampling)
        ):
            return 0
        if prior is not None and prior.num_judged(sampling.temperature) >= SETTINGS.enough_judged_tokens:
            return 0
        return min(SETTINGS.num_prompt_choices, self.tokens.num_prompt_tokens - 1)

    def remember(self) -> None:
        """Keeps the measured acceptance for later generations."""
        prior, conditions = self._acceptance_prior, self._remembered_conditions
        if prior is not None and conditions is not None and self._model is not None:
            prior.learn_from(self._prior_key(self._model), conditions)

    def _prior_key(self, model: ModelInfo) -> PriorKey:
        return PriorKey.at(model.target_fingerprint, self.options.sampling.temperature)
