"""Prompt sets: one JSON object `{"id", "prompt"}` a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.models import EMBEDDED

EMBEDDED_PROMPTS = EMBEDDED / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds a prompt and its name."""

    id: str
    text: str


def load_prompts(
    path: Path | None = None, limit: int | None = None, named: str = "--prompts"
) -> list[Prompt]:
    """Returns the prompts of `path`, or the embedded held-out set. Raises `UsageError` naming file and
    line; `named` is the flag or key that gave the file."""
    path = path or EMBEDDED_PROMPTS
    prompts: dict[str, Prompt] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # within a string JSON may have other line ends
    except OSError as error:
        raise UsageError(f"{named} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{named} {path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = Prompt(str(record["id"]), str(record["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f'{path}:{number}: want {{"id": ..., "prompt": ...}}') from error
        if prompt.id in prompts:
            raise UsageError(f"{path}:{number}: a second prompt has the id {prompt.id!r}")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return list(prompts.values())[:limit]
