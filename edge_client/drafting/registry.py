"""Lists draft strategies by name; each is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.edge_client.drafting.backend import ONNX, TORCH, BackendSettings
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM, DraftModel
from outrider.edge_client.drafting.spec import SPEC_FILE

if TYPE_CHECKING:
    from outrider.edge_client.drafting.copying.model import CopyModel

MODEL, STAGED = "model", "staged"
PROMPT_LOOKUP, SUFFIX, RETRIEVAL = "prompt-lookup", "suffix", "retrieval"
DEFAULT_SUFFIX_TOKENS = 100_000  # of earlier texts of one user; sorting them all takes 40 ms


@dataclass(frozen=True, slots=True)
class CopySettings:
    """Holds the settings of strategies that copy; each uses its own."""

    max_ngram: int = DEFAULT_MAX_NGRAM  # prompt-lookup: the longest run of tokens it looks for
    suffix_tokens: int = DEFAULT_SUFFIX_TOKENS  # suffix: of each user's earlier texts; 0: none
    suffix_store: Path | None = None  # suffix: the directory of their files
    datastore: Path | None = None  # retrieval: the file of other texts


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Holds the settings of all strategies; each uses its own."""

    threads: int  # of a model on a CPU
    has_variance: bool = False  # onnx: its signals tell the variance under MC dropout
    backend: BackendSettings = field(default_factory=BackendSettings)  # of a model
    copies: CopySettings = field(default_factory=CopySettings)


def _create_model(directory: Path, settings: DraftSettings) -> DraftModel:
    return _MODELS[settings.backend.name](directory, settings)


def _create_onnx(directory: Path, settings: DraftSettings) -> DraftModel:
    from outrider.edge_client.drafting.onnx.model import OnnxDraftModel

    return OnnxDraftModel.open(directory, threads=settings.threads, has_variance=settings.has_variance)


def _create_torch(directory: Path, settings: DraftSettings) -> DraftModel:
    with needs_extra("edge-torch", "--draft-backend torch"):
        from outrider.edge_client.drafting.pytorch.model import TorchDraftModel

    return TorchDraftModel.open(directory, settings.backend, threads=settings.threads)


def _create_prompt_lookup(directory: Path, settings: CopySettings) -> CopyModel:
    from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel

    return PromptLookupModel.open(directory, max_ngram=settings.max_ngram)


def _create_suffix(directory: Path, settings: CopySettings) -> CopyModel:
    from outrider.edge_client.drafting.copying.suffix import SuffixModel

    return SuffixModel.open(directory, settings.suffix_tokens, settings.suffix_store)


def _create_retrieval(directory: Path, settings: CopySettings) -> CopyModel:
    from outrider.edge_client.drafting.copying.retrieval import RetrievalModel

    return RetrievalModel.open(directory, settings.datastore)


_MODELS: dict[str, Callable[[Path, DraftSettings], DraftModel]] = {ONNX: _create_onnx, TORCH: _create_torch}
_COPIES: dict[str, Callable[[Path, CopySettings], CopyModel]] = {
    PROMPT_LOOKUP: _create_prompt_lookup,
    SUFFIX: _create_suffix,
    RETRIEVAL: _create_retrieval,
}


def _unions() -> tuple[str, ...]:
    """Returns every strategy: one alone, or a model with what copies. Suffixes include what prompt lookup finds."""
    parts = product((MODEL, STAGED), ("", PROMPT_LOOKUP, SUFFIX), ("", RETRIEVAL))
    named = ("+".join(filter(None, each)) for each in parts)
    return (MODEL, STAGED, *_COPIES, *(name for name in named if "+" in name))


STRATEGIES = _unions()
WITHOUT_MODEL = frozenset(_COPIES)  # cannot write a text alone
WITHOUT_SIGNALS = frozenset(STRATEGIES) - {MODEL, STAGED}  # some of their tokens are copies, which have none


def create_draft_model(
    name: str,
    directory: Path,
    *,
    threads: int = 1,
    has_variance: bool = False,
    backend: BackendSettings | None = None,
    copies: CopySettings | None = None,
) -> DraftModel:
    """Returns the draft in a directory. Raises `UsageError` for an unknown name, `ModelError` for a directory
    that cannot be loaded."""
    if name not in STRATEGIES:
        raise UsageError(f"unknown draft strategy {name!r}; known: {', '.join(STRATEGIES)}")
    backend = backend or BackendSettings()
    backend.check()
    if backend.name != ONNX and name in WITHOUT_MODEL:
        raise UsageError(f"--draft-backend {backend.name} goes with --draft-strategy model: {name} has none")
    if has_variance and backend.name != ONNX:
        raise UsageError(
            f"--gate-variance needs an exported draft's variant for dropout; --draft-backend {backend.name} has none"
        )
    if has_variance and name != MODEL:
        raise UsageError(
            f"--gate-variance needs a model to vary in each token, and --draft-strategy {name} has none"
        )
    settings = DraftSettings(threads, has_variance, backend, copies or CopySettings())
    parts = name.split("+")
    copying = [_COPIES[part](Path(directory), settings.copies) for part in parts if part in _COPIES]
    if name in WITHOUT_MODEL:
        (alone,) = copying
        return alone
    model = _create_model(Path(directory), settings)
    if name == MODEL:
        return model
    from outrider.edge_client.drafting.staged import StagedModel
    from outrider.edge_client.drafting.union import UnionModel

    if STAGED in parts:
        model = StagedModel(model, [_create_suffix(Path(directory), settings.copies)])
    return UnionModel(model, copying) if copying else model


def has_draft_files(name: str, directory: Path, backend: str) -> bool:
    """Returns whether a directory looks like what a strategy drafts with."""
    return name in WITHOUT_MODEL or (directory / ("config.json" if backend == TORCH else SPEC_FILE)).is_file()
