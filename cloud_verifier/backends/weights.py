"""The weights of a model directory by name, read from its safetensors files."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import read_shard_names

Progress = Callable[[int, int], None]  # called with the bytes read so far, and those of all tensors


class Weights:
    """Reads tensors of `model.safetensors`, or of the shards that its index names, inside a `with`."""

    def __init__(
        self, directory: Path, device: str, dtype: torch.dtype, on_progress: Progress | None = None
    ) -> None:
        """Tensors are given in `dtype` on `device`. A file is mapped, so that each goes there by itself, and the host
        never has a copy of all."""
        self._directory = directory
        self._on_progress = on_progress
        self._num_read = 0
        self.device = device
        self.dtype = dtype
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Weights:
        """Reads the headers. Raises `ModelError` for a file that is missing, truncated or no safetensors."""
        from safetensors import SafetensorError, safe_open

        with ExitStack() as files:
            for path in self._shards():
                try:
                    file = files.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ModelError(f"{path} cannot be loaded: {error}") from error
                self._file_of |= dict.fromkeys(file.keys(), file)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._files.close()

    def _shards(self) -> list[Path]:
        single, index = (self._directory / f"model.safetensors{end}" for end in ("", ".index.json"))
        if single.is_file():
            return [single]
        if index.is_file():
            return [self._directory / name for name in read_shard_names(index)]
        raise ModelError(f"{self._directory} has neither model.safetensors nor {index.name}")

    @property
    def names(self) -> set[str]:
        """Returns the names of all tensors."""
        return set(self._file_of)

    @cached_property
    def num_bytes(self) -> int:
        """Returns the size of all tensors in `dtype`."""
        slices = (file.get_slice(name) for name, file in self._file_of.items())
        num_parameters: int = sum(math.prod(each.get_shape()) for each in slices)
        return num_parameters * self.dtype.itemsize

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a copy of a tensor. Raises `ModelError` where it is missing, has another shape, or holds
        integers."""
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self._directory} cannot be loaded: it has no tensor {name!r}")
        tensor: torch.Tensor = file.get_tensor(name)
        if tensor.shape != shape:
            found = list(tensor.shape)
            raise ModelError(
                f"{self._directory} cannot be loaded: tensor {name!r} is {found}, "
                f"config.json says {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise ModelError(f"{self._directory} cannot be loaded: tensor {name!r} is {tensor.dtype}")
        self._num_read += tensor.numel() * self.dtype.itemsize
        self.report(self._num_read / self.num_bytes)
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def report(self, share: float) -> None:
        """Says that this share of all tensors is read, by `read` or by other code."""
        if self._on_progress is not None:
            self._on_progress(round(share * self.num_bytes), self.num_bytes)
