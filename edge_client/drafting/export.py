"""Export a Hugging Face decoder directory to the INT4 ONNX form that the edge drafts with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written where."""

    out_dir: Path
    architecture: str
    num_parameters: int
    num_bytes: int  # of everything written
    files: tuple[str, ...]
    max_context: int
    fingerprint: str
    tokenizer_fingerprint: str


def export_draft(hf_dir: Path, out_dir: Path, *, progress: Progress | None = None) -> ExportReport:
    """Write `draft.onnx`, `draft.json` and `tokenizer.json` into `out_dir`, made if missing.

    Needs the `export` extra. Raises `ModelError` for a directory that is not a Llama-, Qwen2- or
    Qwen3-style safetensors model.
    """
    raise NotImplementedError
