"""Reads directories of trained heads, ours or published, and checks them against the target that is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.probes import check_model_ends
from outrider.cloud_verifier.heads.directory import HeadDirectory
from outrider.cloud_verifier.heads.eagle_layouts import read_eagle, read_specforge, read_speculators
from outrider.cloud_verifier.heads.early_exit import EarlyExit, read_early_exit
from outrider.cloud_verifier.heads.medusa_layouts import read_medusa, read_vllm_medusa
from outrider.cloud_verifier.heads.sequence import Head
from outrider.common.errors import IncompatibleError, ModelError
from outrider.common.types import EARLY_EXIT


@dataclass(frozen=True, slots=True)
class Layout:
    """Describes one way in which heads are published."""

    name: str
    is_of: Callable[[HeadDirectory], bool]
    read: Callable[[HeadDirectory, PagedBackend], Head | EarlyExit]


# The first that a directory is of reads it.
LAYOUTS = (
    Layout("an early exit", lambda each: each.kind == EARLY_EXIT, read_early_exit),
    Layout("EAGLE-3 of speculators", lambda each: "speculators_model_type" in each.config, read_speculators),
    Layout("EAGLE-3 of SpecForge", lambda each: each.has_any("midlayer."), read_specforge),
    Layout("EAGLE", lambda each: each.has_any("fc."), read_eagle),
    Layout("Medusa", lambda each: "medusa_num_heads" in each.config, read_medusa),
    Layout("Medusa in vLLM's layout", lambda each: each.has_any("blocks.", "lm_head"), read_vllm_medusa),
)


def load_heads(paths: Sequence[Path], backend: PagedBackend) -> list[Head | EarlyExit]:
    """Returns the heads of `--heads`. Raises `ModelError` for a directory that cannot be used, `IncompatibleError` for
    one of another target, and where two are of one kind."""
    heads: list[Head | EarlyExit] = []
    for path in paths:
        head = load_head(path, backend)
        if any(other.name == head.name for other in heads):
            raise ModelError(
                f"--heads {path}: a second directory of {head.name}; a verifier serves one of a kind"
            )
        heads.append(head)
    return heads


def load_head(path: Path, backend: PagedBackend) -> Head | EarlyExit:
    """Returns the heads in a directory. Raises as `load_heads` does."""
    directory = HeadDirectory(path)
    wanted = directory.config.get("outrider", {}).get("target_fingerprint")
    # Heads of a target draft for it in another dtype or with quantised weights too: a draft need not be right.
    if wanted and wanted != (found := backend.facts.files_fingerprint):
        raise IncompatibleError(
            f"--heads {path}: trained for the target {wanted[:12]}, and this one is {found[:12]}",
            "train heads for this target: python -m outrider.training.heads",
        )
    try:
        check_model_ends(backend)
    except ModelError as error:
        raise directory.error(str(error)) from error
    for layout in LAYOUTS:
        if layout.is_of(directory):
            try:
                return layout.read(directory, backend)
            except torch.OutOfMemoryError as error:
                raise directory.error(
                    f"no memory is left for it on {backend.device}: lower --kv-memory ({error})"
                ) from error
            except (ValueError, TypeError, KeyError, AttributeError) as error:  # a field of another type
                raise directory.error(f"config.json is not a usable configuration: {error}") from error
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise directory.error(f"it is of no layout that is read: {known}, or Hydra as trained here")
