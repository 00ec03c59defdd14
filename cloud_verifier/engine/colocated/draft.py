"""Loads the draft beside the target, with the verifier or when it is first used."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from outrider.common.errors import IncompatibleError
from outrider.common.process.extras import needs_extra
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.base import DraftModel, DraftSequence


class DeferredDraft:
    """Implements `DraftModel`: loads an exported draft with its first sequence.

    Until then it takes neither memory nor start-up time; what it says of itself is in its draft.json.
    """

    signal_names = ("nll", "entropy", "margin")

    def __init__(self, directory: Path, num_threads: int) -> None:
        """Raises `ModelError` for a directory that is no draft, `MissingExtraError` without onnxruntime."""
        from outrider.edge_client.drafting.spec import read_spec

        spec = read_spec(directory)
        with needs_extra("edge", "drafting"):
            if importlib.util.find_spec("onnxruntime") is None:
                raise ModuleNotFoundError(name="onnxruntime")
        self.num_tokens, self.max_context = spec.num_tokens, spec.max_context
        self.eos_token_ids = spec.eos_token_ids
        self.fingerprint, self.tokenizer_fingerprint = spec.fingerprint, spec.tokenizer_fingerprint
        self._directory, self._num_threads = directory, num_threads
        self._model: DraftModel | None = None

    @property
    def is_loaded(self) -> bool:
        """Returns whether a sequence was asked for."""
        return self._model is not None

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> DraftSequence:
        """Returns a new, empty sequence. Raises `ModelError` where the weights cannot be loaded."""
        from outrider.edge_client.drafting.registry import create_draft_model

        if self._model is None:
            self._model = create_draft_model("model", self._directory, threads=self._num_threads)
        return self._model.sequence(sampling, num_prompt_tokens=num_prompt_tokens, num_support=num_support)

    def close(self) -> None:
        """Releases the weights."""
        if self._model is not None:
            self._model.close()

    def __enter__(self) -> DeferredDraft:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_draft(
    strategy: str,
    directory: Path,
    tokenizer_fingerprint: str,
    *,
    num_threads: int,
    is_deferred: bool = False,
) -> DraftModel:
    """Returns the draft in `directory`, for a target whose tokenizer has this fingerprint; with `is_deferred` an
    exported one, loaded when it is first used.

    Raises `IncompatibleError` for another tokenizer, `ModelError` for a directory that cannot be loaded.
    """
    from outrider.edge_client.drafting.registry import create_draft_model

    draft: DraftModel
    if is_deferred:
        draft = DeferredDraft(directory, num_threads)
    else:
        draft = create_draft_model(strategy, directory, threads=num_threads)
    if draft.tokenizer_fingerprint != tokenizer_fingerprint:
        draft.close()
        raise IncompatibleError(
            f"--draft {directory}: its tokenizer is not the target's",
            "name a draft of the target's family, or none",
        )
    return draft
