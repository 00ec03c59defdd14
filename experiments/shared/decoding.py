"""Decode with the product's own parts inside this process, against a verifier in another."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from outrider.common.methods import DEFAULT_SUPPORT_SIZE
from outrider.common.types import Method, MethodParams, SamplingParams, StopParams
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.events import SessionEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.session.session import EdgeSession, SessionResult, new_session_id
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.remote_verifier import RemoteVerifier


class Cancellable(Protocol):
    """Is what can be watched."""

    def cancel(self) -> None:
        """Ends it soon; from any thread."""


class HungError(AssertionError):
    """Is raised with the stacks of all threads, from when time was up."""


@contextlib.contextmanager
def watched(session: Cancellable, limit_s: float) -> Iterator[None]:
    """Cancels a session that is still at work after `limit_s`, and raises `HungError` once it has ended."""
    stacks: list[str] = []

    def bark() -> None:
        with tempfile.TemporaryFile("w+") as file:  # faulthandler writes to descriptors alone
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks.append(file.read())
        session.cancel()

    timer = threading.Timer(limit_s, bark)
    timer.name, timer.daemon = "session-watch", True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if stacks:
        raise HungError(f"a session was at work for more than {limit_s:g} s:\n{stacks[0]}")


@dataclass(frozen=True)
class Case:
    """Says how to decode: a mode, a draft length or a tree, the distribution, and the method that judges the draft."""

    mode: ExecutionMode
    temperature: float
    num_speculative_tokens: int = 0
    method: Method = Method.COUPLED
    method_params: MethodParams = field(default_factory=MethodParams)
    support_size: int = DEFAULT_SUPPORT_SIZE
    top_p: float = 1.0
    tree: TreeBudget | None = None

    @property
    def name(self) -> str:
        """Returns the case in words; what is usual is left out."""
        has_depth = self.mode in (ExecutionMode.SPECULATIVE, ExecutionMode.CO_LOCATED)
        depth = f" n={self.num_speculative_tokens}" if has_depth else ""
        method = "" if self.method is Method.COUPLED else f" {self.method}"
        top_p = "" if self.top_p == 1 else f" top-p {self.top_p:g}"
        tree = f" tree {self.tree.num_nodes}" if self.tree else ""
        return f"{self.mode}{method}{depth}{tree} T={self.temperature:g}{top_p}"


class Decoder:
    """Holds one draft and one verifier; `decode` runs a whole session, exact unless `on_timeout` says otherwise."""

    def __init__(
        self, address: str, draft: DraftModel, tokenizer: EdgeTokenizer, min_draft_s: float = 0.0
    ) -> None:
        self.draft, self.tokenizer = draft, tokenizer
        self._address = address
        self._min_draft_s = min_draft_s

    def decode(
        self,
        prompt: str,
        case: Case,
        num_new: int,
        seed: int = 1,
        *,
        ignore_eos: bool = True,
        policy: DepthPolicy | None = None,
        window: RoundWindow | None = None,
        transport: str = "stream",
        deadline_s: float | None = 5.0,
        hangs_s: float = math.inf,
        on_timeout: OnTimeout = OnTimeout.WAIT,
        on_event: Callable[[SessionEvent], None] = lambda event: None,
    ) -> SessionResult:
        """Decodes at most `num_new` tokens; exactly as many while end-of-text is ignored.

        `policy` drafts instead of the case's length. A `deadline_s` of None is the product's own rule. Raises
        `HungError` for a session still at work after `hangs_s`.
        """
        session_id = new_session_id()
        prompt_ids = self.tokenizer.encode(prompt)
        verifier = None
        if case.mode is not ExecutionMode.EDGE_ONLY:
            link = GrpcLink(self._address, session_id, transport)
            verifier = RemoteVerifier(
                link, RoundDeadline(deadline_s), is_patient=on_timeout is OnTimeout.WAIT
            )
        session = EdgeSession(
            prompt_ids,
            SessionOptions(
                mode=case.mode,
                sampling=SamplingParams(temperature=case.temperature, top_p=case.top_p, seed=seed),
                stop=StopParams(max_new_tokens=num_new, ignore_eos=ignore_eos),
                method=case.method,
                method_params=case.method_params,
                support_size=case.support_size,
                on_timeout=on_timeout,
                tokenizer_fingerprint=self.tokenizer.fingerprint,
                tree=case.tree,
            ),
            decode=self.tokenizer.decoder(prompt_ids),
            verifier=verifier,
            draft=self.draft if case.mode.has_draft else None,
            depth=policy or FixedDepth(case.num_speculative_tokens),
            window=window,
            session_id=session_id,
            min_draft_s=self._min_draft_s,
        )
        with watched(session, hangs_s) if hangs_s < math.inf else contextlib.nullcontext():
            for event in session.generate():
                on_event(event)
        return session.result
