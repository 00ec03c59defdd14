"""Holds a request that has been read: what to generate, and how to answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.common.types import TokenIds
from outrider.edge_client.daemon.tools.request import ToolUse


class Kind(enum.StrEnum):
    """Distinguishes the two routes that generate."""

    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(slots=True)
class ParsedRequest:
    """Holds one request. `changes` are settings of `RunConfig`, by key, for this request alone."""

    kind: Kind
    prompts: tuple[str | TokenIds, ...] = ()  # of a completion
    messages: tuple[Mapping[str, object], ...] = ()  # of a chat
    template_variables: Mapping[str, object] = field(default_factory=dict)  # of a chat's template
    tool_use: ToolUse | None = None  # of a chat whose answer may call tools
    num_choices: int = 1  # for each prompt
    has_echo: bool = False  # a completion's text begins with its prompt
    is_prompt_only: bool = False  # and is that alone
    model: str | None = None
    is_stream: bool = False
    has_usage: bool = False  # a stream's last chunk tells the usage
    num_top_logprobs: int | None = None  # None: no log-probabilities are wanted
    has_tokens: bool = False  # a stream's chunks say where each token came from
    user: str = ""
    seed: int | None = None
    grammar_param: str = ""  # the field that says what the text obeys
    ignored: list[str] = field(default_factory=list)  # fields that nothing here knows
    changes: dict[str, Any] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)  # the fields that gave them, by setting

    @property
    def constraint_param(self) -> str | None:
        """Returns the field that the text's grammar was made from: one for it, or the tools; None without either."""
        return self.grammar_param or ("tools" if self.tool_use is not None else None)

    @property
    def num_texts(self) -> int:
        """Returns how many texts are generated: choices of all prompts."""
        return self.num_choices * max(1, len(self.prompts))

    @property
    def scores_prompt(self) -> bool:
        """Returns whether the prompt's log-probabilities are asked for."""
        return self.has_echo and self.num_top_logprobs is not None
