"""A scripted verifier behind the edge's own link protocol, and a draft that reads from a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any

from support.edge.virtual import CallersWorld

from outrider.common.alignment import TokenChain
from outrider.common.errors import LinkError
from outrider.common.sampling.support import certain
from outrider.common.types import (
    CancelRequest,
    Closed,
    CloseRequest,
    CorrectionKind,
    Draft,
    GeneratedTokens,
    GenerateRequest,
    Limits,
    Method,
    MethodParams,
    ModelInfo,
    Opened,
    OpenRequest,
    Origin,
    RoundError,
    RoundErrorCode,
    RoundMetrics,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    StopParams,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.base import ShouldStop, ended
from outrider.edge_client.gate.gate import Gate
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.remote_verifier import RemoteVerifier
from outrider.experiments.simulator.world.standins import VirtualClock, virtual_threads
from outrider.experiments.simulator.world.world import VirtualQueue, World

EOS = 0
PROMPT = (90, 91)
TARGET = (*PROMPT, *range(10, 60))  # the target's text: the token at position t is TARGET[t]


class Lost:
    """An action: the connection breaks when the request arrives."""


class Silent:
    """An action: the request arrives, the answer does not."""


class Late:
    """An action: the answer comes together with that of the next request."""


Action = Lost | Silent | Late | RoundError | Callable[[SessionRequest], list[SessionResponse]] | None


def error(code: RoundErrorCode, **details: Any) -> RoundError:
    return RoundError(round_id=-1, code=code, message="by the script", **details)


def make_model(**changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "model_id": "fake",
        "target_fingerprint": "target-1",
        "tokenizer_fingerprint": "tokenizer-1",
        "dtype": "float32",
        "device": "cpu",
        "eos_token_ids": (EOS,),
        "num_tokens": 100,
        "limits": Limits(64, 16, 1 << 20, 8, 60_000),
        "methods": tuple(Method),
        "server_version": "0",
        "draft_fingerprint": "draft-2",
        "draft_sources": ("draft",),
    }
    return ModelInfo(**(fields | changes))


@dataclass
class FakeVerifier:
    """Keeps one session as docs/protocol.md says, in virtual time. `script` maps a request's number to an `Action`.

    Requests are counted from 1 by kind: ("open", 1), ("verify", 3), ("generate", 1).
    """

    target: Sequence[int] = TARGET
    script: dict[tuple[str, int], Action] = field(default_factory=dict)
    model: ModelInfo = field(default_factory=make_model)
    max_context: int = 64
    is_down: Callable[[], bool] = lambda: False
    chain: TokenChain | None = None
    requests: list[SessionRequest] = field(default_factory=list)
    num_connections: int = 0
    held: list[SessionResponse] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    replies: dict[int, tuple[VerifyRequest, Verdict]] = field(default_factory=dict)
    world: World = field(default_factory=CallersWorld)

    # ---------------------------------------------------------------- the link's side

    address = "fake:1"

    def __post_init__(self) -> None:
        self.traffic = Traffic()

    def connect(self, timeout_s: float) -> FakeConnection:
        if self.is_down():
            raise LinkError("cannot connect to a verifier at fake:1: connection refused")
        self.num_connections += 1
        return FakeConnection(self)

    def describe(self, timeout_s: float) -> ModelInfo:
        return self.model

    # ------------------------------------------------------------- the verifier's side

    def of(self, kind: type[Any]) -> list[Any]:
        return [r for r in self.requests if isinstance(r, kind)]

    def take(self, request: SessionRequest, connection: FakeConnection) -> None:
        self.requests.append(request)
        name = type(request).__name__.removesuffix("Request").lower()
        self.counts[name] = self.counts.get(name, 0) + 1
        action = self.script.get((name, self.counts[name]))
        if isinstance(action, Lost):
            connection.lose()
            return
        if isinstance(action, RoundError):
            replies: list[SessionResponse] = [_with_round(action, request)]
        elif callable(action):
            replies = action(request)
        else:
            replies = self.answer(request)
        if isinstance(action, Late):
            self.held += replies
        if isinstance(action, Late | Silent):
            return
        for reply in [*self.held, *replies]:
            connection.inbox.put(reply)
        self.held.clear()

    def answer(self, request: SessionRequest) -> list[SessionResponse]:
        match request:
            case OpenRequest():
                self.chain = TokenChain(request.token_ids)
                token = self._next()
                self.chain.extend((token,))
                return [Opened(self.model, token, self.chain.position, self.chain.hash)]
            case VerifyRequest():
                return [self._verify(request)]
            case GenerateRequest():
                return list(self._generate(request))
            case CloseRequest():
                was_open, self.chain = self.chain is not None, None
                return [Closed(was_open, 0)]
            case CancelRequest():
                return []

    def _next(self) -> int:
        assert self.chain is not None
        return self.target[self.chain.position]

    def _base(self, request: VerifyRequest | GenerateRequest) -> RoundError | None:
        if self.chain is None:
            return RoundError(request.round_id, RoundErrorCode.UNKNOWN_SESSION, "gone")
        if not self.chain.agrees(request.base_position, request.base_hash):
            position, hash_ = self.chain.position, self.chain.hash
            return RoundError(
                request.round_id, RoundErrorCode.UNKNOWN_PREFIX, "not mine", position=position, hash=hash_
            )
        self.chain.truncate(request.base_position)
        self.chain.extend(request.committed_tokens)
        return None

    def _verify(self, request: VerifyRequest) -> SessionResponse:
        if request.round_id in self.replies:
            assert self.replies[request.round_id][0] == request, "a round id with other content"
            return self.replies[request.round_id][1]
        if (refusal := self._base(request)) is not None:
            return refusal
        assert self.chain is not None
        accepted = 0
        kind = CorrectionKind.BONUS
        for token in request.draft_tokens:
            if token != self._next():
                kind = CorrectionKind.CORRECTION
                break
            self.chain.extend((token,))
            accepted += 1
            if token == EOS:
                kind = CorrectionKind.NONE
                break
        correction = 0
        if kind is not CorrectionKind.NONE:
            correction = self._next()
            self.chain.extend((correction,))
        verdict = Verdict(
            request.round_id,
            accepted,
            correction,
            kind,
            self.chain.position,
            self.chain.hash,
            metrics=RoundMetrics(forward_ns=2_000_000, total_ns=3_000_000, batch_size=1),
        )
        self.replies[request.round_id] = (request, verdict)
        return verdict

    def _generate(self, request: GenerateRequest) -> list[SessionResponse]:
        if (refusal := self._base(request)) is not None:
            return [refusal]
        assert self.chain is not None
        replies: list[SessionResponse] = []
        left, is_last = request.max_new_tokens, False
        while not is_last:
            # Co-located: a draft that is always right.
            num_drafted = min(request.num_speculative_tokens, left - 1) if request.is_co_located else 0
            token_ids: list[int] = []
            while len(token_ids) <= num_drafted and not is_last:
                token_ids.append(self._next())
                self.chain.extend(token_ids[-1:])
                left -= 1
                is_last = token_ids[-1] == EOS or not left or self.chain.position >= self.max_context
            own = Origin.BONUS if request.is_co_located else Origin.TARGET
            replies.append(
                GeneratedTokens(
                    request.round_id,
                    tuple(token_ids),
                    (Origin.ACCEPTED,) * (len(token_ids) - 1) + (own,),
                    self.chain.position,
                    self.chain.hash,
                    is_last=is_last,
                    metrics=RoundMetrics(forward_ns=2_000_000, total_ns=3_000_000, batch_size=1),
                    num_draft_tokens=num_drafted,
                    draft_ns=1_000_000,
                )
            )
        return replies


def _with_round(action: RoundError, request: SessionRequest) -> RoundError:
    from dataclasses import replace

    return replace(action, round_id=getattr(request, "round_id", 0))


class FakeConnection:
    queued_s = 0.0

    def __init__(self, verifier: FakeVerifier) -> None:
        self.inbox = VirtualQueue(verifier.world)
        self.is_closed = False
        self._verifier = verifier
        self._is_lost = False

    def send(self, request: SessionRequest) -> None:
        if self._is_lost:
            raise LinkError("lost the connection to fake:1")
        if not self._verifier.is_down():
            self._verifier.take(request, self)

    def receive(self, timeout_s: float) -> SessionResponse | None:
        if self._verifier.is_down():
            self._verifier.world.sleep(timeout_s)
            return None
        try:
            item = self.inbox.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if isinstance(item, LinkError):
            raise item
        return item

    def start_rtt_probe(self) -> None: ...

    def take_rtt(self) -> float | None:
        return None

    def lose(self) -> None:
        self._is_lost = True
        self.inbox.put(LinkError("lost the connection to fake:1"))

    def wake(self) -> None:
        self.inbox.put(None)

    def close(self) -> None:
        self.is_closed = True


class FakeDraft:
    """Proposes `text[position]`, at most up to `max_context`; where text has None, nothing from there."""

    num_tokens = 100
    fingerprint = "draft-1"
    tokenizer_fingerprint = "tokenizer-1"

    def __init__(self, text: Sequence[int] = TARGET, max_context: int = 1000, eos: int = EOS) -> None:
        self.text = list(text)
        self.max_context = max_context
        self.eos_token_ids = (eos,)
        self.sequences: list[FakeSequence] = []

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> FakeSequence:
        self.sequences.append(FakeSequence(self, num_support))
        return self.sequences[-1]

    def close(self) -> None: ...

    def __enter__(self) -> FakeDraft:
        return self

    def __exit__(self, *exc: object) -> None: ...


class FakeSequence:
    def __init__(self, model: FakeDraft, num_support: int) -> None:
        self._model, self.num_support = model, num_support
        self.token_ids: list[int] = []
        self.is_closed = False

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def commit(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def truncate(self, position: int) -> None:
        del self.token_ids[position:]

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        end = min(self.position + num_draft_tokens, self._model.max_context)
        token_ids = tuple(self._model.text[self.position : end])
        if self.num_support:  # a draft that is sure of itself
            supports = tuple(map(certain, token_ids))
            return ended(Draft(token_ids, (1.0,) * len(token_ids), supports=supports), should_stop)
        return ended(Draft(token_ids, (0.5,) * len(token_ids)), should_stop)

    def close(self) -> None:
        self.is_closed = True

    def check_integrity(self) -> None: ...


def make_session(
    verifier: FakeVerifier | None,
    draft: FakeDraft | None = None,
    *,
    mode: ExecutionMode = ExecutionMode.SPECULATIVE,
    depth: int = 4,
    policy: DepthPolicy | None = None,
    on_timeout: OnTimeout = OnTimeout.FIRST_TOKEN,
    deadline_s: float | None = 0.05,
    recover_timeout_s: float = 0.6,
    decode: Callable[[int], str] = lambda token_id: f"<{token_id}>",
    allow_target_change: bool = False,
    sampling: SamplingParams | None = None,
    method: Method = Method.COUPLED,
    method_params: MethodParams = MethodParams(),  # noqa: B008
    num_logprobs: int = 0,
    is_reverified: bool = False,
    gate: Gate | None = None,
    **stop: Any,
) -> EdgeSession:
    stop.setdefault("max_new_tokens", 12)
    options = SessionOptions(
        mode=mode,
        sampling=sampling or SamplingParams(),
        stop=StopParams(**stop),
        method=method,
        method_params=method_params,
        num_logprobs=num_logprobs,
        on_timeout=on_timeout,
        recover_timeout_s=recover_timeout_s,
        is_reverified=is_reverified,
        is_target_change_allowed=allow_target_change,
        tokenizer_fingerprint="tokenizer-1",
    )
    remote = None
    if verifier is not None:
        remote = RemoteVerifier(
            verifier,
            RoundDeadline(deadline_s),
            recover_timeout_s=recover_timeout_s,
            is_patient=on_timeout is OnTimeout.WAIT,
            clock=VirtualClock(verifier.world),
            threads=virtual_threads(verifier.world),
        )
    policy = policy or FixedDepth(depth)
    return EdgeSession(PROMPT, options, decode=decode, verifier=remote, draft=draft, depth=policy, gate=gate)
