"""Runs `edge-client draft datastore build FILES… OUT`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from outrider.common.errors import UsageError
from outrider.common.process.progress import show_progress
from outrider.edge_client.config.run_config import default_draft_dir

_BAR = 24  # characters of the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds `build` and its flags."""
    verbs = parser.add_subparsers(dest="datastore_verb", required=True, metavar="VERB")
    build = verbs.add_parser("build", help="tokenise and index text files for --draft-strategy retrieval")
    build.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text files in UTF-8")
    build.add_argument("out", type=Path, metavar="OUT", help="the datastore to write, for --datastore")
    build.add_argument(
        "--draft",
        type=Path,
        metavar="DIR",
        help="directory with the tokenizer.json; default: the embedded draft's",
    )


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status. Raises `OutriderError`."""
    from outrider.edge_client.drafting.copying.datastore import build_datastore
    from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

    tokenizer = EdgeTokenizer((namespace.draft or default_draft_dir()) / "tokenizer.json")
    if missing := next((path for path in namespace.files if not path.is_file()), None):
        raise UsageError(f"{missing} is no file: name text files, and last the datastore to write")
    start_s = time.monotonic()
    try:
        num_tokens, num_bytes = build_datastore(
            namespace.files,
            namespace.out,
            lambda text: tokenizer.encode(text, is_complete=True),
            tokenizer.fingerprint,
            _show,
        )
    finally:
        show_progress("")
    took_s = time.monotonic() - start_s
    print(f"{namespace.out}: {num_tokens:,} tokens, {num_bytes / 1e6:.1f} MB, in {took_s:.1f} s")
    return 0


def _show(share: float, what: str) -> None:
    filled = round(_BAR * share)
    show_progress(f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%} {what}")
