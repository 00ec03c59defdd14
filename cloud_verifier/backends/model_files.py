"""Checks that a directory has a target that may be loaded, before torch is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.common.errors import ModelError
from outrider.common.models.fingerprint import read_shard_names


def check_model_files(directory: Path) -> dict[str, Any]:
    """Returns the parsed config.json of a complete directory.

    Raises `ModelError` for what is missing or unsafe.
    """
    if not directory.is_dir():
        raise ModelError(f"no model directory at {directory}")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise ModelError(f"{directory} has no {name}")
    if not any(directory.glob("*.safetensors")):
        pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        if pickled:
            raise ModelError(
                f"{directory} has its weights in {pickled[0]}: pickled weights can run code "
                "and are not loaded; convert them to safetensors"
            )
        raise ModelError(f"{directory} has no *.safetensors weights")
    index = directory / "model.safetensors.index.json"
    if index.exists():
        read_shard_names(index)  # transformers would unpickle what it names otherwise
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / 'config.json'} cannot be read: {error}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or not kind:
        raise ModelError(f"{directory / 'config.json'} names no model_type")
    return dict(config)
