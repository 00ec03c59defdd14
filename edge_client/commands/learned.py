"""Runs `edge-client draft learned show|reset DIR`."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.common.errors import ModelError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs."""
    verbs = parser.add_subparsers(dest="learned_verb", required=True, metavar="VERB")
    show = verbs.add_parser("show", help="print what each head in DIR learned from and what it brings")
    reset = verbs.add_parser("reset", help="remove all heads in DIR, damaged ones too")
    for each in (show, reset):
        each.add_argument("directory", type=Path, metavar="DIR", help="the directory of --learn")


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status: 1 where a head cannot be read. Raises `UsageError`."""
    from outrider.edge_client.drafting.learned.files import head_paths

    directory = namespace.directory
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory: give the one of --learn")
    paths = head_paths(directory)
    if not paths:
        print(f"{directory} has no learned heads")
    if namespace.learned_verb == "show":
        can_read = [_show(path) for path in paths]  # each is shown, whatever another is
        return int(not all(can_read))
    for path in paths:
        path.unlink()
        print(f"{path} removed")
    return 0


def _show(path: Path) -> bool:
    """Prints a head; returns whether it could be read."""
    from outrider.edge_client.drafting.learned.files import read_facts

    try:
        facts = read_facts(path)
    except ModelError as error:
        print(error)
        return False
    counts = facts["counts"]
    number = counts["num_tokens"]
    print(f"{path}: draft {facts['draft_fingerprint'][:12]}, target {facts['target_fingerprint'][:12]}")
    base, head = (counts[f"{name}_overlap"] / max(1, number) for name in ("base", "head"))
    print(f"  {number} tokens judged: overlap with the target {base:.3f} alone, {head:.3f} with the head")
    is_drafting = facts["gain"] > facts["settings"]["margin"]
    print(
        f"  lately {facts['gain']:+.4f} with it: {'it drafts' if is_drafting else 'the draft drafts alone'}"
    )
    return True
