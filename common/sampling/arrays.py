"""The few places where numpy and torch spell the same operation differently. Imports numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np


def is_numpy(xp: Any) -> bool:
    """Returns whether the namespace `xp` is numpy, not torch."""
    return xp is np


def copy(xp: Any, array: Any) -> Any:
    """Returns a copy of an array of `xp`."""
    return array.copy() if is_numpy(xp) else array.clone()


def native(xp: Any, values: Any, like: Any) -> Any:
    """Returns a numpy array in the namespace, and on the device, of `like`."""
    return values if is_numpy(xp) else xp.asarray(values).to(like.device)


def sorted_descending(xp: Any, array: Any) -> Any:
    """Returns the values of each row, largest first: [rows, n]."""
    return np.sort(array, axis=-1)[:, ::-1] if is_numpy(xp) else xp.sort(array, dim=-1, descending=True)[0]


def as_float64(xp: Any, array: Any) -> Any:
    """Returns an array of `xp` in float64."""
    return array.astype(np.float64) if is_numpy(xp) else array.to(xp.float64)
