"""Defines an ArgumentParser that suggests the nearest flag for an unknown one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import UsageError


class VerbParser(argparse.ArgumentParser):
    """Parses verbs, each with a parser of the same kind that rejects unknown arguments itself."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Exits with status 2 and a suggestion where an argument is unknown."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = "; text of several words goes in quotes"
            if flag.startswith("-"):
                nearest = did_you_mean(flag, self._option_string_actions, likeness=0.75)
                hint = nearest or f"; {self.prog} --help has those there are"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Exits with status 2; the exit's cause has the message."""
        try:
            super().error(message)
        except SystemExit as stop:
            raise stop from UsageError(message)
