"""Keeps a library quiet while it loads a model: what it found is said by ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quiet_loading(hf_logging: Any) -> Iterator[None]:
    """Silences progress bars, advice and warnings on stderr, and restores the settings.

    `hf_logging` is the module `transformers.utils.logging`, which this package does not import.
    """
    verbosity, had_bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bar:
            hf_logging.enable_progress_bar()
