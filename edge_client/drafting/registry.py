"""Lists draft strategies by name; each is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.edge_client.drafting.backend import ONNX, TORCH, BackendSettings
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM, DraftModel
from outrider.edge_client.drafting.spec import SPEC_FILE

MODEL = "model"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Holds the settings of all strategies; each uses its own."""

    threads: int  # of a model on a CPU
    max_ngram: int  # prompt-lookup: the longest run of tokens it looks for
    has_variance: bool = False  # onnx: its signals tell the variance under MC dropout
    backend: BackendSettings = field(default_factory=BackendSettings)  # of a model


def _create_model(directory: Path, settings: DraftSettings) -> DraftModel:
    return _MODELS[settings.backend.name](directory, settings)


def _create_onnx(directory: Path, settings: DraftSettings) -> DraftModel:
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    return OnnxDraftModel.open(directory, threads=settings.threads, has_variance=settings.has_variance)


def _create_torch(directory: Path, settings: DraftSettings) -> DraftModel:
    with needs_extra("edge-torch", "--draft-backend torch"):
        from outrider.edge_client.drafting.pytorch.model import TorchDraftModel

    return TorchDraftModel.open(directory, settings.backend, threads=settings.threads)


def _create_prompt_lookup(directory: Path, settings: DraftSettings) -> DraftModel:
    from outrider.edge_client.drafting.prompt_lookup import PromptLookupModel

    return PromptLookupModel.open(directory, max_ngram=settings.max_ngram)


_MODELS: dict[str, Callable[[Path, DraftSettings], DraftModel]] = {ONNX: _create_onnx, TORCH: _create_torch}
_FACTORIES: dict[str, Callable[[Path, DraftSettings], DraftModel]] = {
    MODEL: _create_model,
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
    backend: BackendSettings | None = None,
) -> DraftModel:
    """Returns the draft in a directory. Raises `UsageError` for an unknown name, `ModelError` for a directory
    that cannot be loaded."""
    factory = _FACTORIES.get(name)
    if factory is None:
        raise UsageError(f"unknown draft strategy {name!r}; known: {', '.join(STRATEGIES)}")
    backend = backend or BackendSettings()
    backend.check()
    if backend.name != ONNX and name in WITHOUT_MODEL:
        raise UsageError(f"--draft-backend {backend.name} goes with --draft-strategy model: {name} has none")
    if has_variance and backend.name != ONNX:
        raise UsageError(
            f"--gate-variance needs an exported draft's variant for dropout; --draft-backend {backend.name} has none"
        )
    if has_variance and name in WITHOUT_MODEL:
        raise UsageError(f"--gate-variance needs a model to vary, and --draft-strategy {name} has none")
    return factory(Path(directory), DraftSettings(threads, max_ngram, has_variance, backend))


def has_draft_files(name: str, directory: Path, backend: str) -> bool:
    """Returns whether a directory looks like what a strategy drafts with."""
    return name in WITHOUT_MODEL or (directory / ("config.json" if backend == TORCH else SPEC_FILE)).is_file()
