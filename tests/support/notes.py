"""What tests say of what they measured."""

from __future__ import annotations

from collections.abc import Callable

Note = Callable[[str], None]  # takes a line, which the run shows at its end
