"""Reads config.json and the tensors of a directory of trained heads, each tensor once, by name and shape."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import directory_fingerprint
from outrider.common.types import EARLY_EXIT

_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLED = ("medusa_lm_head.pt", "pytorch_model.bin")
_PREFIX = "medusa_heads."  # which vLLM takes off too
MAX_COUNT = 64  # of heads and of their blocks


class HeadDirectory:
    """Holds what one directory has. What is wrong with it is a `ModelError` that names `--heads` and the directory."""

    _left: dict[str, Tensor]

    def __init__(self, path: Path) -> None:
        """Raises `ModelError` for a file that is missing, cannot be read or is pickled."""
        self.path = path
        self.config = self._read_config()
        if self.kind == EARLY_EXIT:  # which has no weights
            self._left = {}
            self.fingerprint = directory_fingerprint([path / "config.json"])
            return
        weights = self._find_weights()
        self._left = self._read_tensors(weights)
        self.fingerprint = directory_fingerprint([path / "config.json", weights])

    @property
    def kind(self) -> Any:
        """Returns what config.json says of our own kinds; None where it says nothing."""
        return self.config.get("outrider", {}).get("kind")

    def error(self, text: str) -> ModelError:
        """Returns the error that says what is wrong with the directory."""
        return ModelError(f"--heads {self.path}: {text}")

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def has_any(self, *prefixes: str) -> bool:
        """Returns whether a tensor is left whose name begins so."""
        return any(name.startswith(prefixes) for name in self._left)

    def num_numbered(self) -> int:
        """Returns one more than the highest number that a tensor's name begins with, 0 where there is none."""
        numbers = (name.partition(".")[0] for name in self._left)
        return 1 + max((int(each) for each in numbers if each.isdecimal()), default=-1)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor in float32. Raises `ModelError` where it is missing, has another shape or holds integers."""
        tensor = self._take(name, shape)
        if not tensor.is_floating_point():
            raise self.error(f"{name} is {tensor.dtype}; want floating point")
        return tensor.float()

    def read_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor of integers or booleans as int64. Raises as `read` does."""
        tensor = self._take(name, shape)
        if tensor.is_floating_point():
            raise self.error(f"{name} is {tensor.dtype}; want integers")
        return tensor.to(torch.int64)

    def num_rows(self, name: str) -> int:
        """Returns the first size of a tensor, 0 where it is missing."""
        return len(self._left[name]) if name in self._left else 0

    def leave(self, *names: str) -> None:
        """Passes over tensors that may be there and are of no use."""
        for name in names:
            self._left.pop(name, None)

    def fill(self, module: nn.Module, name_of: Callable[[str], str]) -> None:
        """Reads all parameters of a module; `name_of` maps their names to those of the tensors."""
        for name, parameter in module.named_parameters():
            parameter.data = self.read(name_of(name), tuple(parameter.shape))

    def check_all_read(self) -> None:
        """Raises `ModelError` for tensors that nothing asked for."""
        if self._left:
            raise self.error(f"the tensor {min(self._left)} is not of this kind of head")

    def count(self, name: str, most: int = MAX_COUNT) -> int:
        """Returns a field of config.json. Raises `ModelError` where it is no number from 1 to `most`."""
        value = self.config.get(name)
        if type(value) is not int or not 1 <= value <= most:
            raise self.error(f"config.json: {name} is {value!r}; want a number from 1 to {most}")
        return value

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            raise self.error(f"the tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise self.error(f"{name} is {found}; the target and config.json want {list(shape)}")
        return tensor

    def _read_config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.path / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self.error(f"config.json cannot be read: {error}") from error
        if not isinstance(config, dict) or not isinstance(config.get("outrider", {}), dict):
            raise self.error("config.json is not an object")
        return config

    def _find_weights(self) -> Path:
        if (found := _weights_of(self.path)) is not None:
            return found
        for name in _PICKLED:
            if (self.path / name).is_file():
                raise self.error(f"{name} is pickled, which is never loaded: save it as safetensors")
        raise self.error(f"{_WEIGHTS[0]} is missing")

    def _read_tensors(self, weights: Path) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        try:
            tensors: dict[str, Tensor] = load_file(weights)
        except Exception as error:  # safetensors raises its own kind
            raise self.error(f"{weights.name} cannot be read: {error}") from error
        return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def num_parameters(path: Path) -> int:
    """Returns how many numbers the weights of a directory have, 0 where they cannot be read: nothing is checked yet."""
    from safetensors import SafetensorError, safe_open

    if (weights := _weights_of(path)) is None:
        return 0
    try:
        with safe_open(weights, framework="pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (SafetensorError, OSError):
        return 0


def _weights_of(path: Path) -> Path | None:
    return next((path / name for name in _WEIGHTS if (path / name).is_file()), None)
