"""Runs `edge-client completion SHELL`: prints the script that completes verbs and flags, made by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")
_EPILOG = """\
examples:
  bash   edge-client completion bash > ~/.local/share/bash-completion/completions/edge-client
  zsh    edge-client completion zsh > "${fpath[1]}/_edge-client"
  tcsh   edge-client completion tcsh | sudo tee /etc/profile.d/edge-client.completion.csh"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `completion`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="which shell's script to print")


def main(namespace: argparse.Namespace) -> int:
    """Prints the script and returns the exit status."""
    import shtab

    from outrider.common.config.fields import leaves
    from outrider.edge_client.commands.parser import make_parser
    from outrider.edge_client.config.run_config import RunConfig

    parser = make_parser(is_whole=True)
    choices = {leaf.key: leaf.choices for leaf in leaves(RunConfig) if leaf.choices}
    _describe_values(parser, choices, {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY})
    print(shtab.complete(parser, namespace.shell))
    return 0


def _describe_values(
    parser: argparse.ArgumentParser,
    choices: Mapping[str, Sequence[str]],
    files: Mapping[str, Mapping[str, Any]],
) -> None:
    """Adds to each flag the values it takes, which argparse is not given: the configuration's choices, and
    files by metavar."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _describe_values(each, choices, files)
        elif action.dest in choices:
            action.choices = choices[action.dest]
        elif str(action.metavar) in files:
            action.complete = files[str(action.metavar)]  # type: ignore[attr-defined]
