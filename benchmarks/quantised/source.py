"""The model that the embedded draft was exported from, as a Hugging Face directory: its graph's weights, in float32."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.models import EMBEDDED
from outrider.training.draft.restore import restore_draft


@contextmanager
def draft_source() -> Iterator[Path]:
    """Yields the directory, which is there meanwhile."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "draft"
        restore_draft(EMBEDDED / "draft", source)
        yield source
