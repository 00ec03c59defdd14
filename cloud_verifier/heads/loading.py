"""Reads a directory of trained heads, ours or published, and checks it against the target that is served.

    ours                  config.json: {"medusa_num_heads", "medusa_num_layers", "outrider": {"kind", …}}
    Medusa's own          config.json: {"medusa_num_heads", "medusa_num_layers"}; medusa_lm_head.safetensors

The tensors of Medusa's heads are `{k}.{block}.linear.weight|bias` and, where a head has an output embedding of its own,
`{k}.{num_blocks}.weight`; of Hydra's there is `{k}.inputs.weight|bias` too (`training/heads/directory.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.cloud_verifier.heads.hydra import HydraSequence
from outrider.cloud_verifier.heads.medusa import MedusaSequence
from outrider.cloud_verifier.heads.modules import HydraHead, MedusaHead
from outrider.cloud_verifier.heads.sequence import Head, HeadFacts, HeadSequence
from outrider.common.errors import IncompatibleError, ModelError
from outrider.common.models.fingerprint import directory_fingerprint

_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
_KINDS: dict[str, type[HeadSequence]] = {"medusa": MedusaSequence, "hydra": HydraSequence}


def load_heads(directories: Sequence[Path], backend: TransformersBackend) -> list[Head]:
    """Returns the heads of `--heads`. Raises `ModelError` for a directory that cannot be used, `IncompatibleError` for
    one of another target, and where two are of one kind."""
    heads: list[Head] = []
    for directory in directories:
        head = load_head(directory, backend)
        if any(other.name == head.name for other in heads):
            raise ModelError(
                f"--heads {directory}: a second directory of {head.name}; a verifier serves one of a kind"
            )
        heads.append(head)
    return heads


def load_head(directory: Path, backend: TransformersBackend) -> Head:
    """Returns the heads in a directory. Raises as `load_heads` does."""
    config = _read_config(directory)
    ours = config.get("outrider", {})
    kind = ours.get("kind", "medusa")
    if kind not in _KINDS or "medusa_num_heads" not in config:
        known = ", ".join(_KINDS)
        raise ModelError(
            f"--heads {directory}: config.json is of no kind that is served: {known}, or Medusa's own"
        )
    wanted = ours.get("target_fingerprint")
    if wanted and wanted != backend.fingerprint:
        raise IncompatibleError(
            f"--heads {directory}: trained for the target {wanted[:12]}, and this one is {backend.fingerprint[:12]}",
            "train heads for this target: python -m outrider.training.heads",
        )
    path = _weights_file(directory)
    tensors = _Tensors(directory, path)
    num_heads, num_blocks = (
        _count(directory, config, name) for name in ("medusa_num_heads", "medusa_num_layers")
    )
    size = backend.decoder.embed(torch.zeros(1, dtype=torch.int64, device=backend.device)).shape[-1]
    weights = nn.ModuleList(
        _make(tensors, kind, number, num_blocks, size, backend.vocab_size) for number in range(num_heads)
    )
    tensors.check_all_read()
    weights.to(backend.device, getattr(torch, backend.dtype)).requires_grad_(False)
    facts = HeadFacts(
        name=kind,
        max_depth=num_heads,
        feature_layers=(backend.facts.num_layers,),
        reads_all=False,
        fingerprint=directory_fingerprint([directory / "config.json", path]),
    )
    return Head(backend, facts, weights, _KINDS[kind])


def _make(
    tensors: _Tensors, kind: str, number: int, num_blocks: int, size: int, vocab_size: int
) -> nn.Module:
    head = MedusaHead(size, num_blocks) if kind == "medusa" else HydraHead(size, number + 1, num_blocks)
    for name, parameter in head.named_parameters():
        read = tensors.read(f"{number}.{name.removeprefix('blocks.')}", tuple(parameter.shape))
        parameter.data = read
    if isinstance(head, MedusaHead) and (own := f"{number}.{num_blocks}.weight") in tensors:
        head.output = nn.Linear(size, vocab_size, bias=False)
        head.output.weight.data = tensors.read(own, (vocab_size, size))
    return head


class _Tensors:
    """Reads tensors by name, and knows which were not asked for."""

    def __init__(self, directory: Path, path: Path) -> None:
        from safetensors.torch import load_file

        self._directory = directory
        try:
            self._left: dict[str, Tensor] = load_file(path)
        except Exception as error:  # safetensors raises its own kind
            raise ModelError(f"--heads {directory}: {path.name} cannot be read: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor in float32. Raises `ModelError` where it is missing or has another shape."""
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise ModelError(f"--heads {self._directory}: the tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise ModelError(
                f"--heads {self._directory}: {name} is {found}; the target and config.json want {list(shape)}"
            )
        return tensor.float()

    def check_all_read(self) -> None:
        """Raises `ModelError` for tensors that nothing asked for."""
        if self._left:
            raise ModelError(
                f"--heads {self._directory}: the tensor {min(self._left)} is not of this kind of head"
            )


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"--heads {directory}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("outrider", {}), dict):
        raise ModelError(f"--heads {directory}: config.json is not an object")
    return config


def _count(directory: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= 64:
        raise ModelError(f"--heads {directory}: config.json: {name} is {value!r}; want a number from 1 to 64")
    return value


def _weights_file(directory: Path) -> Path:
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return directory / name
    for name in _PICKLED:
        if (directory / name).is_file():
            raise ModelError(
                f"--heads {directory}: {name} is pickled, which is never loaded: save it as safetensors"
            )
    raise ModelError(f"--heads {directory}: {_WEIGHTS[0]} is missing")
