"""Read the safetensors weights of a model directory as float32 numpy, one tensor at a time.

The format is a little-endian uint64 header length, a JSON header and raw bytes. It is read here and
not with the safetensors package because that one refuses bfloat16 without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import read_shard_names

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # absolute, bytes
    end: int


class TensorDirectory:
    """Reads the tensors of `model.safetensors`, or of the shards that its index names."""

    def __init__(self, hf_dir: Path) -> None:
        """Reads headers only. Raises `ModelError` when files are missing, truncated or of another kind."""
        self._hf_dir = hf_dir
        self._entries = {name: entry for path in _shards(hf_dir) for name, entry in _read_header(path)}
        self._read_names: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_parameters_read(self) -> int:
        """Returns the number of parameters of all tensors that were read."""
        return sum(int(np.prod(self._entries[name].shape)) for name in self._read_names)

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Returns a tensor as float32. Raises `ModelError` where it is missing or has another shape or an
        integer dtype."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self._hf_dir} has no tensor {name!r}")
        if entry.shape != shape:
            raise ModelError(f"{entry.path}: {name!r} has shape {entry.shape}, config.json says {shape}")
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{entry.path}: {name!r} is {entry.dtype}; export reads {', '.join(_DTYPES)}")
        self._read_names.add(name)
        raw = np.memmap(entry.path, np.uint8, "r", entry.start, entry.end - entry.start)
        values = raw.view(_DTYPES[entry.dtype]).reshape(shape)
        if entry.dtype == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def _shards(hf_dir: Path) -> list[Path]:
    index = hf_dir / "model.safetensors.index.json"
    single = hf_dir / "model.safetensors"
    if single.exists():
        return [single]
    if index.exists():
        names = read_shard_names(index)
        missing = [name for name in names if not (hf_dir / name).exists()]
        if missing:
            raise ModelError(f"{hf_dir} lacks the shard {missing[0]} that its index names")
        return [hf_dir / name for name in names]
    others = sorted(p.name for p in hf_dir.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".ckpt"))
    if others:
        raise ModelError(f"{hf_dir} has {others[0]} but no safetensors; only safetensors weights are read")
    raise ModelError(f"{hf_dir} has no model.safetensors")


def _read_header(path: Path) -> Iterator[tuple[str, _Entry]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ModelError(f"{path} is not a safetensors file, or is truncated")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            entries = {
                name: _entry(path, info, 8 + length)
                for name, info in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: its header cannot be read") from error
    for name, entry in entries.items():
        if not 8 + length <= entry.start <= entry.end <= size:
            raise ModelError(f"{path} is truncated: {name!r} ends past the file")
        yield name, entry


def _entry(path: Path, info: dict[str, Any], data_start: int) -> _Entry:
    start, end = info["data_offsets"]
    shape = tuple(int(n) for n in info["shape"])
    dtype = str(info["dtype"])
    if dtype in _DTYPES and (end - start) != int(np.prod(shape)) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError("size and shape disagree")
    return _Entry(path, dtype, shape, data_start + int(start), data_start + int(end))
