"""What a request says of tools."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ToolChoice(enum.StrEnum):
    """Says whether an answer calls tools: as the model likes, at least once, or one given tool once."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Tool:
    """Holds one function. `definition` is what the template gets, `parameters` a JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, object]
    definition: Mapping[str, object]
    is_strict: bool = False  # its arguments obey the schema also where the model chooses to call it


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Holds the tools of a request that may call some; `name` is the one that is to be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    is_parallel: bool = True  # one answer may have several calls

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Returns the tools that this answer may call."""
        if self.choice is ToolChoice.NAMED:
            return tuple(tool for tool in self.tools if tool.name == self.name)
        return self.tools

    @property
    def is_forced(self) -> bool:
        """Returns whether the answer is a call."""
        return self.choice is not ToolChoice.AUTO

    def max_calls(self, of_family: int) -> int:
        """Returns how many calls an answer may have."""
        return of_family if self.is_parallel and self.choice is not ToolChoice.NAMED else 1
