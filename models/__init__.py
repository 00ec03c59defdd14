"""The embedded draft–target pair and its directory. Imports nothing of ours."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent / "embedded"
"""The directory of the pair: `draft/`, `target/`, `prompts.jsonl`, `heads/`."""


def shipped_heads() -> list[Path]:
    """Returns the directories of heads that were trained for the embedded target, `heads/KIND`, by name."""
    return sorted(path.parent for path in EMBEDDED.glob("heads/*/config.json"))
