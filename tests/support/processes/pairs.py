"""The embedded pair's folder, and a small random pair that a test run builds for itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.models import EMBEDDED as EMBEDDED


@dataclass(frozen=True)
class Pair:
    """A target directory and two INT4 drafts for it: of its own weights, and of random ones."""

    target: Path
    own_draft: Path
    random_draft: Path
