"""Depth policies by name, each imported when it is created."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outrider.common.errors import UsageError

if TYPE_CHECKING:  # commands that draft nothing, `--help` too, read the names alone
    from outrider.edge_client.controller.conditions import Conditions
    from outrider.edge_client.controller.depth.base import DepthPolicy

_MODULES = {"fixed": "fixed", "ratio": "stepped", "window": "stepped", "optimal": "optimal"}
DEPTH_POLICIES = tuple(_MODULES)


def create_depth_policy(
    name: str, num_speculative_tokens: int | None = None, conditions: Conditions | None = None
) -> DepthPolicy:
    """Returns a new policy. `num_speculative_tokens` is the length of `fixed` and the start of the others.

    None is each policy's own start. `conditions` are those that the session observes. Raises `UsageError` for
    an unknown name and a start outside the range.
    """
    if name not in _MODULES:
        raise UsageError(f"unknown depth policy {name!r}; known: {', '.join(DEPTH_POLICIES)}")
    module = import_module(f"outrider.edge_client.controller.depth.{_MODULES[name]}")
    kind, start = getattr(module, f"{name.capitalize()}Depth"), num_speculative_tokens
    if start is not None and not kind.MIN_DEPTH <= start <= kind.MAX_DEPTH:
        within = f"between {kind.MIN_DEPTH} and {kind.MAX_DEPTH}"
        raise UsageError(f"--num-speculative-tokens {start}: --depth-policy {name} starts {within}")
    known = {"conditions": conditions} if name == "optimal" else {}
    policy: DepthPolicy = kind(**known) if start is None else kind(start, **known)
    return policy
