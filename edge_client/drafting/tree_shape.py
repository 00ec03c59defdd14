"""A fixed shape of trees, for `--tree-shape`: which choices of the draft are nodes, whatever it drafts.

    {"choices": [[0], [0, 0], [1], [0, 1]], "about": …}

Each node is its path: `[0, 1]` is the draft's second choice after its first one. Nodes are in order of their value, a
node after the one before it on its path, so that the first N are a shape too. `training/calibrate_tree.py` writes it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.common.errors import ConfigError
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Ranks


def read_tree_shape(path: Path) -> tuple[Ranks, ...]:
    """Returns the nodes. Raises `ConfigError` naming the file, the field and what was expected."""
    try:
        status = path.stat()
        return _read(path, (status.st_mtime_ns, status.st_size))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


@lru_cache(8)
def _read(path: Path, stamp: tuple[int, int]) -> tuple[Ranks, ...]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get("choices"), list)
        or not content["choices"]
    ):
        raise ConfigError(f"{path}: choices: expected a list of paths, such as [[0], [0, 0], [1]]")
    if unknown := content.keys() - {"choices", "about"}:
        raise ConfigError(f"{path}: {min(unknown)}: unknown; expected choices, about")
    found: dict[Ranks, None] = {(): None}
    for number, ranks in enumerate(content["choices"]):
        if why := _why_wrong(ranks, found):
            raise ConfigError(f"{path}: choices[{number}] {json.dumps(ranks)} {why}")
        found[tuple(ranks)] = None
    return tuple(found)[1:]


def _why_wrong(ranks: Any, found: dict[Ranks, None]) -> str:
    """Returns what is wrong with a path after those that were found before it; empty where nothing is."""
    is_path = isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks)
    if not is_path or not all(0 <= rank < MAX_CONTINUATIONS for rank in ranks):
        return f"is no path: expected a list of numbers from 0 to {MAX_CONTINUATIONS - 1}"
    if tuple(ranks) in found:
        return "comes twice"
    if tuple(ranks[:-1]) not in found:
        return f"comes before {json.dumps(ranks[:-1])}, the path that it continues"
    return ""
