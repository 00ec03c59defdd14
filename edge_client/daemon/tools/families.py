"""How chat templates have a model write tool calls. A family is recognised by what its template writes for the calls of
earlier messages.

Qwen 2.5 and 3, Hermes   <tool_call>\\n{"name": N, "arguments": {...}}\\n</tool_call>   any number, text before
Llama 3.1 to 3.3         {"name": N, "parameters": {...}}                             one, and no text
Mistral 7B 0.3, Nemo     [TOOL_CALLS][{"name": N, "arguments": {...}}, ...]           any number, text before
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

MAX_CALLS = 16  # in one answer, where a grammar makes them
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """Holds what the calls of a family look like. A call is a JSON object with `name` and `arguments_key`; `opening`
    and `closing` are around each, or around a JSON array of all where it `is_array`."""

    name: str
    arguments_key: str = "arguments"
    opening: str = ""
    closing: str = ""
    is_array: bool = False
    max_calls: int = MAX_CALLS
    has_short_ids: bool = False  # nine letters and digits: the template takes no others

    def new_id(self) -> str:
        """Returns a random id for a call."""
        if self.has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFamily("Qwen and Hermes", opening="<tool_call>", closing="</tool_call>")
LLAMA = ToolFamily("Llama 3", arguments_key="parameters", max_calls=1)
MISTRAL = ToolFamily("Mistral", opening="[TOOL_CALLS]", is_array=True, has_short_ids=True)
FAMILIES = (HERMES, LLAMA, MISTRAL)


def family_of(template: str) -> ToolFamily | None:
    """Returns the family of a chat template; None where its calls have another form."""
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder's arguments are XML
        return HERMES
    if (
        "[TOOL_CALLS]" in template and "[ARGS]" not in template
    ):  # Mistral's later form has no JSON around calls
        return MISTRAL
    if "<|start_header_id|>ipython" in template and '"parameters"' in template:
        return LLAMA
    return None
