"""Holds a conversation: its messages so far, and the sessions that continue it."""

from __future__ import annotations

from outrider.common.errors import UsageError
from outrider.common.types import Method
from outrider.edge_client.config.request_config import request_config
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import REQUESTABLE_MODES, ExecutionMode
from outrider.edge_client.drafting.pool import create_pool, with_lease
from outrider.edge_client.session.factory import Edge, draw_seed
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.tokenization.chat_template import ChatTemplate, Message

_POOL_BYTES = 256 << 20


class Conversation:
    """Holds messages where there is a chat template, a single running text where there is none. Raises
    `UsageError` for a system message without a template."""

    def __init__(self, edge: Edge, template: ChatTemplate | None, system: str | None = None) -> None:
        self.config: RunConfig = edge.config
        self.seed = 0
        self._edge = edge
        self._template = template
        self._pool = create_pool(edge.draft, _POOL_BYTES)
        self._messages: list[Message] = []
        self._text = ""
        self._system = ""
        if system:
            self.set_system(system)

    @property
    def has_template(self) -> bool:
        """Returns whether messages are rendered by a chat template."""
        return self._template is not None

    @property
    def system(self) -> str:
        """Returns the system message, "" where there is none."""
        return self._system

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the labels that results carry."""
        return self._edge.labels

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self._text = ""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def set_system(self, text: str) -> None:
        """Sets the system message and begins anew. Raises `UsageError` without a template."""
        if self._template is None:
            raise UsageError("a system message needs a chat template, and this model has none")
        self._system = text
        self.reset()

    def set_mode(self, name: str) -> None:
        """Changes the mode of later answers. Raises `UsageError` for an unknown mode, and for one that needs
        a draft where none is loaded."""
        if name not in REQUESTABLE_MODES:
            raise UsageError(f"there is no mode {name}; there are {', '.join(REQUESTABLE_MODES)}")
        mode = ExecutionMode(name)
        if mode.has_draft and self._edge.draft is None:
            raise UsageError(f"mode {name} drafts here, and no draft was loaded: start with --mode {name}")
        self.config = request_config(self._edge.config, {"mode": mode})

    def begin(self, words: str) -> EdgeSession:
        """Returns a session that answers `words`. Raises `OutriderError`, and leaves the conversation
        unchanged then."""
        self.seed = self.config.seed if self.config.seed is not None else draw_seed()
        tokenizer = self._edge.tokenizer
        if self._template is not None:
            asked: list[Message] = [*self._messages, {"role": "user", "content": words}]
            prompt_ids = tokenizer.encode(self._template.render(asked), is_complete=True)
        else:
            prompt_ids = tokenizer.encode(self._joined(words))
        draft = self._edge.draft
        if self._pool is not None and self._may_reuse:
            draft = with_lease(draft, self._pool.lease())
        return self._edge.session(prompt_ids, self.seed, self.config, draft)

    def add(self, words: str, answer: str) -> None:
        """Adds a message and its answer to the conversation."""
        self._messages += [{"role": "user", "content": words}, {"role": "assistant", "content": answer}]
        self._text = self._joined(words) + answer

    def _joined(self, words: str) -> str:
        """Returns the running text with one more line."""
        return words if not self._text else self._text.rstrip("\n") + "\n" + words

    @property
    def _may_reuse(self) -> bool:
        """See `outrider.edge_client.drafting.pool`."""
        return (
            self.config.verification.method is Method.COUPLED
            and self.config.mode is not ExecutionMode.EDGE_ONLY
        )
