"""The JSON object that a command prints with `--json`: one, whatever comes after it."""

from __future__ import annotations

import json


class JsonOutput:
    """Prints at most one object: what ends a command that has printed its own adds no second one."""

    def __init__(self) -> None:
        self._is_printed = False

    def print(self, report: dict[str, object]) -> None:
        """Prints `report`, unless one was printed."""
        if self._is_printed:
            return
        line = json.dumps(report)
        self._is_printed = True  # before: a signal may arrive after the first byte
        print(line)
