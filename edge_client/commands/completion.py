"""`edge-client completion SHELL`: the script that makes TAB know verbs and flags. Written by shtab."""

from __future__ import annotations

import argparse

from common.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")
_EPILOG = """\
examples:
  bash   edge-client completion bash > ~/.local/share/bash-completion/completions/edge-client
  zsh    edge-client completion zsh > "${fpath[1]}/_edge-client"
  tcsh   edge-client completion tcsh | sudo tee /etc/profile.d/edge-client.completion.csh"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="which shell's script to print")


def main(namespace: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise UsageError("completion needs shtab: pip install 'outrider[edge]'") from error
    from edge_client.cli import whole_parser

    print(shtab.complete(whole_parser(), namespace.shell))
    return 0
