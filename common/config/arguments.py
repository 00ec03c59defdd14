"""Defines an ArgumentParser that suggests a verb or flag for an unknown one: the one that does what a flag of another
server does there, else the nearest by its spelling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Sequence
from typing import Any, NoReturn

from outrider.common.config.loader import did_you_mean
from outrider.common.errors import UsageError

# Flags of vLLM, llama-server and ollama, and our own former ones, with the flags that do the same here: the first that
# the command has is suggested.
_FLAGS_HERE: dict[str, tuple[str, ...]] = {
    "--model": ("--target", "--draft"),
    "-m": ("--target", "--draft"),
    "--max-model-len": ("--session-max-tokens",),
    "--ctx-size": ("--session-max-tokens",),
    "-c": ("--session-max-tokens",),
    "--max-num-seqs": ("--max-sessions", "--max-requests"),
    "--parallel": ("--max-sessions", "--max-requests"),
    "--max-num-batched-tokens": ("--max-step-tokens",),
    "--gpu-memory-utilization": ("--kv-memory",),
    "--host": ("--listen",),
    "--port": ("--listen",),
    "--threads": ("--num-threads", "--draft-threads"),
    "--max-tokens": ("--max-new-tokens",),
    "--n-predict": ("--max-new-tokens",),
    "-n": ("--max-new-tokens",),
    "--draft-max": ("--num-speculative-tokens",),
    "--model-draft": ("--draft",),
    "--served-model-name": ("--model-name",),
    "--alias": ("--model-name",),
    "--api-key": ("--api-key-file", "--tokens"),
    "--recover-timeout": ("--recover-timeout-s",),
    "--read-timeout": ("--read-timeout-s",),
    "--write-timeout": ("--write-timeout-s",),
    "--stop-grace": ("--stop-grace-s",),
}


class VerbParser(argparse.ArgumentParser):
    """Parses verbs, each with a parser of the same kind that rejects unknown arguments itself, and flags that are
    shortened: what a flag begins with today may be a flag of its own tomorrow."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Exits with status 2 and a suggestion where an argument is unknown; prints help where a verb is missing."""
        if self._subparsers is not None and not (sys.argv[1:] if args is None else args):
            self.print_help()
            self.exit()
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            shown, hint = " ".join(unknown), "; text of several words goes in quotes"
            if unknown[0].startswith("-"):
                shown = unknown[0].partition("=")[0]  # what follows may be a secret
                flags = self._option_string_actions
                nearest = _flag_here(shown, flags) or did_you_mean(shown, flags, likeness=0.75)
                hint = nearest or f"; {self.prog} --help has those there are"
            self.error(f"unrecognized arguments: {shown}{hint}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            nearest = did_you_mean(str(value), action.choices, likeness=0.5)
            raise argparse.ArgumentError(
                None,
                f"there is no verb {value!r}{nearest or '; there are ' + ', '.join(action.choices)}",
            )
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Exits with status 2; the exit's cause has the message."""
        try:
            super().error(message)
        except SystemExit as stop:
            raise stop from UsageError(message)


def _flag_here(name: str, flags: Container[str]) -> str:
    """Returns the end of a message: the flag of this command that does what another server's `name` does; empty where
    there is none."""
    found = next((each for each in _FLAGS_HERE.get(name, ()) if each in flags), None)
    return f"; here it is {found}" if found else ""
