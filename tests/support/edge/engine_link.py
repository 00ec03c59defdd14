"""The real engine behind the edge's own link protocol: one thread, virtual time, faults by chance.

Nothing moves until the edge looks: a look without waiting (`poll`) may find an answer ripe or not, as the
random numbers say, so that any number of rounds gets under way in any order of events.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.edge.virtual import CallersWorld
from support.fakes import FakeBackend

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.verification.grammars import GrammarStore
from outrider.common.codec import decode_request, encode_request
from outrider.common.errors import LinkError
from outrider.common.sampling.support import certain
from outrider.common.tree import Tree
from outrider.common.types import (
    DRAFT_SOURCE,
    Draft,
    GenerateRequest,
    ModelInfo,
    OpenRequest,
    RoundError,
    RoundErrorCode,
    RunnerUp,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    Support,
    TokenIds,
    VerifyRequest,
)
from outrider.edge_client.drafting.base import NodeRule, ShouldStop, ended
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.tree_builder import TreeBuilder
from outrider.edge_client.drafting.trees import Continuations, Expander, TreeBudget, TreeDraft
from outrider.edge_client.transport.link.base import Traffic
from outrider.experiments.simulator.world.standins import VirtualClock, virtual_threads

DARK_WAIT_S = 30.0  # that a wait lasts at most while nothing passes: an outage is a few of them


@dataclass(frozen=True)
class Chances:
    """Of each request or look, to suffer something."""

    ripe: float = 0.3  # an answer is there when the edge looks without waiting
    lose_connection: float = 0.0  # before or after the request got through
    lose_answer: float = 0.0
    duplicate: float = 0.0
    late_older: float = 0.0  # an older round arrives once more behind a newer one
    refuse: float = 0.0  # by an engine that is busy
    lose_kv: float = 0.0  # somebody else needs the blocks
    lose_session: float = 0.0
    delay_answer: float = 0.0  # past a wait or two
    swap_answers: float = 0.0  # one overtakes those that lie there
    outage: float = 0.0  # nothing passes either way for a few waits; what was sent arrives behind it


@dataclass
class EngineLink:
    """`VerifierLink` of one session."""

    backend: FakeBackend
    chances: Chances = Chances()
    seed: int = 0
    address: str = "engine:1"
    openings: list[OpenRequest] = field(default_factory=list)
    sent: list[VerifyRequest] = field(default_factory=list)
    replies: list[SessionResponse] = field(default_factory=list)
    fired: Counter[str] = field(default_factory=Counter)  # what happened
    num_dark: int = 0  # sends and waits that the outage still lasts
    grammars: GrammarStore | None = None
    config: ServeConfig = field(default_factory=ServeConfig)

    def __post_init__(self) -> None:
        world = CallersWorld()
        self.clock, self.threads = VirtualClock(world), virtual_threads(world)
        self.traffic = Traffic()
        has_grammars = self.grammars is not None
        self.model = make_model_info(self.backend, self.config, has_grammars=has_grammars)
        self.random = random.Random(self.seed)
        self.engine = Engine(self.backend, self.model, grammars=self.grammars, clock=self.clock)
        self.session_id = b"s" * 16

    def happens(self, chance: float) -> bool:
        return self.random.random() < chance

    def fires(self, name: str) -> bool:
        has_happened = self.happens(getattr(self.chances, name))
        self.fired[name] += has_happened
        return has_happened

    def is_dark(self) -> bool:
        """Asked once a send or wait."""
        if not self.num_dark and self.chances.outage and self.fires("outage"):
            self.num_dark = self.random.randint(1, 8)
        self.num_dark = max(0, self.num_dark - 1)
        return self.num_dark > 0

    def connect(self, timeout_s: float) -> EngineConnection:
        return EngineConnection(self)

    def describe(self, timeout_s: float) -> ModelInfo:
        return self.model

    def check_integrity(self) -> None:
        self.engine.check_integrity()
        for session in self.engine.sessions:
            if session.kv is not None:
                kept = session.kv.tokens  # type: ignore[attr-defined]
                assert kept == session.chain.token_ids[: len(kept)], "KV and text drifted apart"

    def disturb(self) -> None:
        for session in list(self.engine.sessions):
            if session.running is None and self.fires("lose_kv"):
                self.engine.sessions.free(session)
            if session.running is None and self.fires("lose_session"):
                self.engine.sessions.forget(session)


class EngineConnection:
    queued_s = 0.0

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._inbox: deque[SessionResponse] = deque()
        self._delayed: deque[SessionResponse] = deque()
        self._held: deque[SessionRequest] = deque()  # sent in an outage
        self._is_lost = False

    def send(self, request: SessionRequest) -> None:
        link = self._link
        if self._is_lost:
            raise LinkError("lost")
        link.clock.sleep(0.001)
        if link.is_dark() or self._held:
            self._held.append(request)
            return
        is_hit = isinstance(request, VerifyRequest | GenerateRequest)
        if is_hit and link.fires("lose_connection"):
            self._is_lost = True
            if link.happens(0.5):
                self._deliver(request)
            raise LinkError("lost while sending")
        self._deliver(request)
        if isinstance(request, VerifyRequest):
            link.sent.append(request)
            if link.fires("duplicate"):
                self._deliver(request)
            if link.fires("late_older"):
                self._deliver(link.random.choice(link.sent))

    def _deliver(self, request: SessionRequest) -> None:
        link = self._link
        if isinstance(request, VerifyRequest) and link.fires("refuse"):
            code = RoundErrorCode.REFUSED
            self._inbox.append(RoundError(request.round_id, code, "busy", retry_after_ms=20))
            return
        message = encode_request(request)
        arrived = decode_request(type(message).FromString(message.SerializeToString()), link.model.limits)
        if isinstance(arrived, OpenRequest):
            link.session_id = arrived.session_id
            link.openings.append(arrived)
        is_lossy = isinstance(request, VerifyRequest)

        def reply(response: SessionResponse) -> None:
            link.replies.append(response)
            if self._is_lost or (is_lossy and link.fires("lose_answer")):
                return
            if is_lossy and link.chances.delay_answer and link.fires("delay_answer"):
                self._delayed.append(response)
            elif is_lossy and link.chances.swap_answers and self._inbox and link.fires("swap_answers"):
                self._inbox.appendleft(response)
            else:
                self._inbox.append(response)

        arrival_ns = int(link.clock.now() * 1e9)
        link.engine.submit(Job(link.session_id, arrived, reply, arrival_ns))

    def receive(self, timeout_s: float) -> SessionResponse | None:
        link = self._link
        if self._is_lost:
            raise LinkError("lost")
        if timeout_s > 0 and link.is_dark():
            link.clock.sleep(min(timeout_s, DARK_WAIT_S))
            return None
        while self._held and not link.num_dark:
            self._deliver(self._held.popleft())
        if timeout_s <= 0:
            if link.num_dark or not link.happens(link.chances.ripe):
                return None
            self._step()
            return self._inbox.popleft() if self._inbox else None
        while not self._inbox and (link.engine.num_jobs or link.engine.num_arrived):
            self._step()
        if self._inbox:
            return self._inbox.popleft()
        if self._delayed and link.happens(0.5):
            link.clock.sleep(timeout_s / 2)
            return self._delayed.popleft()
        link.clock.sleep(timeout_s)
        return None

    def _step(self) -> None:
        self._link.clock.sleep(0.002)
        self._link.engine.step()
        self._link.check_integrity()
        self._link.disturb()

    def start_rtt_probe(self) -> None: ...

    def take_rtt(self) -> float | None:
        return 0.01 if self._link.happens(0.3) else None

    def wake(self) -> None: ...

    def close(self) -> None:
        while self._held and self._link.happens(0.5):  # as far as it had left the edge
            self._deliver(self._held.popleft())
        self._is_lost = True
        self._link.clock.sleep(0.3)  # the next probe is due


class ChanceDraft:
    """Knows a text and proposes it; each token is wrong by a chance that its position alone decides, and the
    runner-up of a wrong one is right by the chance `second`."""

    num_tokens = 32
    eos_token_ids = (0,)
    fingerprint = tokenizer_fingerprint = ""

    def __init__(
        self, text: Sequence[int], accuracy: float, seed: int, max_context: int = 1000, second: float = 0.0
    ) -> None:
        self.text, self.max_context = list(text), max_context
        wrong = random.Random(seed)
        self.text = [t if wrong.random() < accuracy else (t + 1) % self.num_tokens for t in self.text]
        self.runner_ups = [
            RunnerUp(
                t if ours != t and wrong.random() < second else (ours + 7) % self.num_tokens,
                wrong.choice((0.05, 0.7, 5.0)),
            )
            for ours, t in zip(self.text, text, strict=True)
        ]

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> ChanceSequence:
        return ChanceSequence(self, num_support > 0)

    def close(self) -> None: ...


class ChanceSequence:
    def __init__(self, model: ChanceDraft, has_supports: bool) -> None:
        self._model, self._has_supports = model, has_supports
        self._keeps_runner_ups = False
        self.token_ids: list[int] = []

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def keep_runner_ups(self, is_wanted: bool = True) -> None:
        self._keeps_runner_ups = is_wanted

    def commit(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def truncate(self, position: int) -> None:
        assert position <= len(self.token_ids)
        del self.token_ids[position:]

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        end = min(self.position + num_draft_tokens, self._model.max_context)
        known = self._model.text[self.position : end]
        known += [3] * (max(0, end - self.position) - len(known))
        supports = tuple(map(certain, known)) if self._has_supports else ()
        told = self._model.runner_ups[self.position : end] if self._keeps_runner_ups else []
        told += [RunnerUp(4, 1.0)] * (len(known) - len(told) if self._keeps_runner_ups else 0)
        draft = Draft(tuple(known), (1.0,) * len(known), supports=supports, runner_ups=tuple(told))
        return ended(draft, should_stop)

    def propose_along(self, token_ids: Sequence[int]) -> TokenIds:
        start = self.position
        self.commit(token_ids)
        return tuple(self._model.text[start : self.position + 1])

    def propose_tree(self, budget: TreeBudget, values: NodeValues, rule: NodeRule | None = None) -> TreeDraft:
        """The text's own tokens as the likeliest path; beside them runner-ups, and behind those anything."""
        room = min(budget.max_depth, self._model.max_context - self.position)
        chance = random.Random(self.position)
        tokens: list[int] = []
        parents: list[int] = []

        def grow(parent: int, depth: int, is_on_text: bool) -> None:
            if depth == room or len(tokens) >= budget.num_nodes:
                return
            place = self.position + depth
            known = place < len(self._model.text)
            first = (
                self._model.text[place] if is_on_text and known else chance.randrange(self._model.num_tokens)
            )
            others = [self._model.runner_ups[place].token_id] if is_on_text and known else []
            others += [chance.randrange(self._model.num_tokens) for _ in range(budget.max_width)]
            children = list(dict.fromkeys([first, *others]))[: chance.randint(1, budget.max_width)]
            for number, token_id in enumerate(children):
                if len(tokens) < budget.num_nodes:
                    tokens.append(token_id)
                    parents.append(parent)
                    grow(len(tokens) - 1, depth + 1, is_on_text and number <= 1)

        grow(-1, 0, is_on_text=True)
        none: tuple[Continuations, ...] = ()
        tree = Tree(parents)
        ids = [tuple(tokens[child] for child in tree.children(node)) for node in tree.internal]
        return TreeDraft(
            tuple(tokens),
            (),
            supports=tuple(Support(each, (1,) * len(each)) for each in ids) if self._has_supports else (),
            parents=tuple(parents),
            values=tuple(chance.uniform(0.1, 1.0) for _ in tokens),
            continuations=(none,) * (len(tokens) + 1),
        )

    def propose_union(
        self, budget: TreeBudget, values: NodeValues, copies: Sequence[Expander[Continuations]]
    ) -> TreeDraft:
        """The text's own tokens with their runner-ups, and what copies tell."""
        return TreeBuilder(values, budget, copies=copies).build([_TextExpander(self)])

    def continuations(self, path: TokenIds) -> Continuations:
        place = self.position + len(path)
        if place >= min(len(self._model.text), self._model.max_context):
            return Continuations((), (), DRAFT_SOURCE)
        ids = dict.fromkeys((self._model.text[place], self._model.runner_ups[place].token_id))
        return Continuations(tuple(ids), (0.0, 1.0)[: len(ids)], DRAFT_SOURCE)

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...


class _TextExpander:
    """Knows a path's end once it knows the path: what it is asked must follow what it was asked."""

    def __init__(self, sequence: ChanceSequence) -> None:
        self._sequence = sequence
        self._known: set[TokenIds] = set()
        self.num_runs = 0

    def expand(self, paths: Sequence[TokenIds]) -> list[Continuations]:
        self.num_runs += 1
        for path in paths:
            assert not path or path[:-1] in self._known, "a node comes before its parent"
            self._known.add(path)
        return [self._sequence.continuations(path) for path in paths]
