"""Names the keyword arguments by which models of transformers ask their attention for more than softmax attention,
which neither side computes."""

from __future__ import annotations

from collections.abc import Mapping

_UNSUPPORTED = ("s_aux", "sinks", "head_mask", "position_bias")


def unsupported_argument(given: Mapping[str, object]) -> str | None:
    """Returns the first such argument that is given; None where there is none."""
    return next((name for name in _UNSUPPORTED if given.get(name) is not None), None)
