"""What both clients are: a shared edge, the sessions under way, and an orderly end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from outrider.common.errors import ClosedError
from outrider.common.process.extras import needs_extra
from outrider.common.types import ModelInfo
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.depth.base import DepthPolicy
from outrider.edge_client.core.options import ExecutionMode, OnTimeout
from outrider.edge_client.library.settings import call_config, checked_prompt, naming_keys
from outrider.edge_client.session.factory import OpenDraft, Surroundings
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.session.shared_edge import Prepared, SharedEdge, create_shared_edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # for the verifier's description: a user waits for it
GenerationT = TypeVar("GenerationT")


class Connection:
    """Asks the verifier for its description, then loads the draft. Thread-safe.

    Raises `LinkError` where nothing answers, `ModelError` and `UsageError` for the draft. With mode edge-only or
    on_timeout edge_only, which need no verifier, none is asked and `model` is None.
    """

    def __init__(
        self,
        config: RunConfig,
        has_draft: bool | None,
        open_draft: OpenDraft | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        """`open_draft` opens another draft than that of the configuration; `surroundings` may bring another link than
        that to the configured address."""
        surroundings = surroundings or Surroundings()
        with needs_extra("edge", "outrider.connect"):
            import tokenizers  # noqa: F401
        with naming_keys():
            self.config = config
            self.model = _ask(config, surroundings)
            self._shared: SharedEdge = create_shared_edge(config, has_draft, open_draft, surroundings)
        self._running: set[EdgeSession] = set()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def tokenizer(self) -> EdgeTokenizer:
        """Returns the tokenizer of draft and target."""
        return self._shared.edge.tokenizer

    def prepare(
        self,
        prompt: str | Iterable[int],
        sampling: Mapping[str, object],
        depth: DepthPolicy | None = None,
        owner: str = "",
    ) -> Prepared:
        """Returns a session that is ready to start; `depth` replaces the configured policy, and of texts that the draft
        keeps it has those of `owner`. Raises `UsageError` for the prompt or a setting, `ClosedError` after `close`."""
        self._check_open()
        config = call_config(self.config, sampling)
        with naming_keys():
            return self._shared.prepare(
                checked_prompt(prompt, self.tokenizer.num_tokens), config, depth, owner
            )

    def start(
        self, prepared: Prepared, create: Callable[[EdgeSession, bool, Callable[[], None]], GenerationT]
    ) -> GenerationT:
        """Returns the running generation that `create` makes. Raises `ClosedError` after `close`."""
        session = prepared.session
        with self._changed:
            self._check_open()
            self._running.add(session)
        try:
            return create(session, prepared.config.outage.reverify, lambda: self._ended(session))
        except BaseException:  # no thread was started that would end it
            self._ended(session)
            raise

    def close(self, cancel: bool) -> None:
        """Waits for the generations under way, or cancels them, and frees the draft. A second call may still cancel
        what the first one waits for."""
        with self._changed:
            is_first, self._is_closed = not self._is_closed, True
            running = tuple(self._running)
        if running:
            log.info("closing: %s %d generations", "cancels" if cancel else "waits for", len(running))
        for session in running if cancel else ():
            session.cancel()
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if is_first:
            self._shared.close()

    def check_integrity(self) -> None:
        """Asserts that what the sessions share is consistent."""
        self._shared.check_integrity()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this client is closed", "open another with outrider.connect")

    def _ended(self, session: EdgeSession) -> None:
        with self._changed:
            self._running.discard(session)
            self._changed.notify_all()


def _ask(config: RunConfig, surroundings: Surroundings) -> ModelInfo | None:
    link = surroundings.create_link(config, surroundings.new_session_id())
    if config.mode is ExecutionMode.EDGE_ONLY or config.outage.on_timeout is OnTimeout.EDGE_ONLY:
        return None
    return link.describe(CONNECT_TIMEOUT_S)
