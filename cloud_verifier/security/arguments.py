"""The flags of `cloud-verifier token` and `cert`, in a file without heavy imports so that `--help` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_LIFETIME = "90d"
DEFAULT_DIRECTORY = Path("outrider-dev-certs")


def add_token_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs and flags of `cloud-verifier token`."""
    verbs = parser.add_subparsers(dest="token_verb", required=True, metavar="VERB")
    new = verbs.add_parser("new", help="make a token and print it, once; only its hash is kept")
    new.add_argument("--tenant", required=True, metavar="NAME", help="whose calls it makes")
    new.add_argument(
        "--expires",
        default=DEFAULT_LIFETIME,
        metavar="TIME",
        help=f"how long it holds: 90d, 12h, never (default: {DEFAULT_LIFETIME})",
    )
    new.add_argument("--admin", action="store_true", help="for the admin port beyond loopback, only for it")
    new.add_argument("--out", type=Path, metavar="FILE", help="write it there, mode 0600; do not print it")
    show = verbs.add_parser("list", help="show the tokens, without what makes them secret")
    revoke = verbs.add_parser("revoke", help="end a token; its open streams are cut off")
    revoke.add_argument("id", metavar="ID", help="the first column of `token list`")
    for verb in (new, show, revoke):
        verb.add_argument("--tokens", type=Path, metavar="FILE", help="the file `serve --tokens` reads")
        verb.add_argument("--config", type=Path, metavar="FILE", help="YAML file that may name it")


def add_cert_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs and flags of `cloud-verifier cert`."""
    verbs = parser.add_subparsers(dest="cert_verb", required=True, metavar="VERB")
    dev = verbs.add_parser("dev", help="make a local authority, and certificates of a server and a client")
    dev.add_argument(
        "--dir", type=Path, default=DEFAULT_DIRECTORY, metavar="DIR", help=f"(default: {DEFAULT_DIRECTORY})"
    )
    dev.add_argument(
        "--host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names and addresses of the server beside localhost, 127.0.0.1 and ::1",
    )
    dev.add_argument("--tenant", default="default", metavar="NAME", help="common name of the client")
