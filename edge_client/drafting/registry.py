"""Draft strategies by name, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.errors import UsageError
from edge_client.drafting.base import DraftModel


def _create_onnx(directory: Path, threads: int) -> DraftModel:
    from edge_client.drafting.onnx_model import OnnxDraftModel

    return OnnxDraftModel.open(directory, threads=threads)


_FACTORIES: dict[str, Callable[[Path, int], DraftModel]] = {"onnx": _create_onnx}


def create_draft_model(name: str, directory: Path, *, threads: int = 1) -> DraftModel:
    """Raises `UsageError` for an unknown name, `ModelError` for a directory that cannot be loaded."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UsageError(f"unknown draft strategy {name!r}; known: {', '.join(_FACTORIES)}")
    return factory(Path(directory), threads)
