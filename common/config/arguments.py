"""A command line that says of a flag it does not know which one may be meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from outrider.common.config.loader import did_you_mean


class VerbParser(argparse.ArgumentParser):
    """Verbs added to it are of its kind, and each refuses by itself what it does not know."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = "; text of several words goes in quotes"
            if flag.startswith("-"):
                nearest = did_you_mean(flag, self._option_string_actions, likeness=0.75)
                hint = nearest or f"; {self.prog} --help has those there are"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown
