"""Lists draft strategies by name; each is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM, DraftModel


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Holds the settings of all strategies; each uses its own."""

    threads: int  # onnx
    max_ngram: int  # prompt-lookup: the longest run of tokens it looks for
    has_variance: bool = False  # onnx: its signals tell the variance under MC dropout


def _create_onnx(directory: Path, settings: DraftSettings) -> DraftModel:
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    return OnnxDraftModel.open(directory, threads=settings.threads, has_variance=settings.has_variance)


def _create_prompt_lookup(directory: Path, settings: DraftSettings) -> DraftModel:
    from outrider.edge_client.drafting.prompt_lookup import PromptLookupModel

    return PromptLookupModel.open(directory, max_ngram=settings.max_ngram)


_FACTORIES: dict[str, Callable[[Path, DraftSettings], DraftModel]] = {
    "onnx": _create_onnx,
    "prompt-lookup": _create_prompt_lookup,
}
STRATEGIES = tuple(_FACTORIES)
WITHOUT_MODEL = frozenset({"prompt-lookup"})  # these cannot write a text alone


def create_draft_model(
    name: str,
    directory: Path,
    *,
    threads: int = 1,
    max_ngram: int = DEFAULT_MAX_NGRAM,
    has_variance: bool = False,
) -> DraftModel:
    """Returns the draft in a directory. Raises `UsageError` for an unknown name, `ModelError` for a directory
    that cannot be loaded."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UsageError(f"unknown draft strategy {name!r}; known: {', '.join(STRATEGIES)}")
    if has_variance and name in WITHOUT_MODEL:
        raise UsageError(f"--gate-variance needs a model to vary, and --draft-strategy {name} has none")
    return factory(Path(directory), DraftSettings(threads, max_ngram, has_variance))
