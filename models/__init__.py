"""The embedded draft–target pair and its directory. Imports nothing of ours."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = Path(__file__).resolve().parent / "embedded"
"""The directory of the pair: `draft/`, `target/`, `prompts.jsonl`."""
