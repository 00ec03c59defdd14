"""Says by which arguments models of transformers ask their attention for more than softmax attention over the tokens
before, which neither side computes."""

from __future__ import annotations

from collections.abc import Mapping

_UNSUPPORTED = ("s_aux", "sinks", "head_mask", "position_bias")


def unsupported_argument(module: object, mask: object, given: Mapping[str, object]) -> str | None:
    """Returns the first such argument that a layer's attention (`module`) is given, quoted; None where there is none.

    `mask` is its attention mask, `given` its further keyword arguments. transformers makes no mask for an attention
    without a mask function, so one that arrives is the model's own. Without a mask it is the module that says whether
    attention is causal.
    """
    if mask is not None:
        return "'attention_mask' (the model makes a mask of its own)"
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return "'is_causal' (it is false: tokens attend to later ones)"
    return next((f"{name!r}" for name in _UNSUPPORTED if given.get(name) is not None), None)
