"""The files that the index of a sharded model lists."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.common.errors import ModelError


def read_shard_names(index: Path) -> list[str]:
    """Returns the sorted names in a `model.safetensors.index.json`.

    Raises ModelError for a file that is no index, and for a name that is not of a safetensors file beside it:
    loading what such an index lists could unpickle, or read elsewhere.
    """
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not a safetensors index") from error
    for name in names:
        if not isinstance(name, str) or not name.endswith(".safetensors") or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no safetensors file beside it")
    return names
