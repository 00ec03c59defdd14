"""`python -m benchmarks.loop`: processor time of a synchronous round in the edge's loop, nothing else.

The verifier and the draft are stand-ins with the text at hand: no model, no wire, no other thread. Other work on
the machine errs in one direction only, so the tenth percentile of many stretches of rounds is to be compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Sequence

from outrider.common.alignment import TokenChain
from outrider.common.types import (
    Closed,
    CorrectionKind,
    Draft,
    Limits,
    Method,
    ModelInfo,
    Opened,
    OpenRequest,
    RoundMetrics,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    Signals,
    StopParams,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.core.options import SessionOptions
from outrider.edge_client.drafting.base import ShouldStop
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.base import Traffic
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

NUM_TOKENS, NUM_TEXTS, STRETCH = 2000, 12, 50
_PROMPT = (90, 91)
_TEXT = [*_PROMPT, *random.Random(1).choices(range(1, 8000), k=NUM_TOKENS + 40)]
_HASHES = [chain.hash_at(i) for chain in [TokenChain(_TEXT)] for i in range(len(_TEXT) + 1)]
_LIMITS = Limits(100_000, 16, 1 << 20, 8, 60_000)
_MODEL = ModelInfo(1, "", "target", "tokenizer", "float32", "cpu", (0,), 8192, _LIMITS, tuple(Method), "0")
_METRICS = RoundMetrics(alpha_mean=0.5, forward_ns=5_000_000, total_ns=6_000_000, batch_size=1)
_SIGNALS = Signals(0.1, 0.2, 0.3)
_MISS_EVERY = 3  # rounds whose third token falls, by where they begin


class _Verifier:
    """Is a link and its connection at once; an answer is ready as soon as its request is sent."""

    address = "stand-in:1"
    queued_s = 0.0

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._replies: deque[SessionResponse] = deque()

    def connect(self, timeout_s: float) -> _Verifier:
        return self

    def describe(self, timeout_s: float) -> ModelInfo:
        return _MODEL

    def send(self, request: SessionRequest) -> None:
        if isinstance(request, VerifyRequest):
            self._replies.append(_verdict(request))
        elif isinstance(request, OpenRequest):
            end = len(request.token_ids)
            self._replies.append(Opened(_MODEL, _TEXT[end], end + 1, _HASHES[end + 1]))
        else:
            self._replies.append(Closed(True, 0))

    def receive(self, timeout_s: float) -> SessionResponse | None:
        return self._replies.popleft() if self._replies else None

    def start_rtt_probe(self) -> None: ...

    def take_rtt(self) -> float | None:
        return None

    def wake(self) -> None: ...

    def close(self) -> None: ...


def _verdict(request: VerifyRequest) -> Verdict:
    start, draft = request.base_position + len(request.committed_tokens), request.draft_tokens
    pairs = enumerate(zip(draft, _TEXT[start:], strict=False))
    num = next((i for i, (theirs, ours) in pairs if theirs != ours), len(draft))
    kind = CorrectionKind.BONUS if num == len(draft) else CorrectionKind.CORRECTION
    end = start + num + 1
    return Verdict(request.round_id, num, _TEXT[end - 1], kind, end, _HASHES[end], metrics=_METRICS)


class _Sequence:
    def __init__(self) -> None:
        self.position = 0

    def commit(self, token_ids: Sequence[int]) -> None:
        self.position += len(token_ids)

    def truncate(self, position: int) -> None:
        self.position = position

    def propose(self, num_draft_tokens: int, should_stop: ShouldStop | None = None) -> Draft:
        ids = _TEXT[self.position : self.position + num_draft_tokens]
        if self.position % _MISS_EVERY == 0 and len(ids) > 2:
            ids[2] += 1
        return Draft(tuple(ids), (0.5,) * len(ids), (_SIGNALS,) * len(ids))

    def close(self) -> None: ...

    def check_integrity(self) -> None: ...


class _Draft:
    num_tokens, max_context, eos_token_ids = 8192, 1 << 20, (0,)
    fingerprint, tokenizer_fingerprint, signal_names = "draft", "tokenizer", ("nll", "entropy", "margin")

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> _Sequence:
        return _Sequence()

    def close(self) -> None: ...

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, *exc: object) -> None: ...


def round_us(num_tokens: int = NUM_TOKENS) -> list[float]:
    """Returns the µs a round of one text, a figure for each stretch of rounds."""
    options = SessionOptions(
        stop=StopParams(max_new_tokens=num_tokens, ignore_eos=True), tokenizer_fingerprint="tokenizer"
    )
    remote = RemoteVerifier(_Verifier(), RoundDeadline())
    depth = FixedDepth(4)
    session = EdgeSession(_PROMPT, options, decode=str, verifier=remote, draft=_Draft(), depth=depth)
    rounds, found, seen, last_s = session.result.stats.rounds, [], 0, 0.0
    for _ in session.generate():
        if len(rounds) % STRETCH == 0 and len(rounds) != seen:
            now_s = time.process_time()
            found.append((now_s - last_s) / STRETCH * 1e6)
            seen, last_s = len(rounds), now_s
    assert list(session.result.token_ids) == _TEXT[2 : 2 + num_tokens], "another text"
    return found[1:]


def main() -> None:
    """Runs the command."""
    round_us()
    found = sorted(each for _ in range(NUM_TEXTS) for each in round_us())
    tenth, middle = found[len(found) // 10], statistics.median(found)
    print(f"a synchronous round's loop: {tenth:.0f} µs of processor time (p10), {middle:.0f} (median)")


if __name__ == "__main__":
    main()
