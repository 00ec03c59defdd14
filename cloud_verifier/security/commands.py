"""The commands `cloud-verifier token new|list|revoke` and `cloud-verifier cert dev`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from outrider.cloud_verifier.config import SCOPE, ServeConfig
from outrider.cloud_verifier.security.token_file import Records, change_tokens, read_tokens
from outrider.cloud_verifier.security.tokens import TokenRecord, check_tenant, new_token, parse_lifetime
from outrider.common.config.loader import load_config
from outrider.common.errors import UsageError


def token(namespace: argparse.Namespace) -> int:
    """Runs `cloud-verifier token` and returns its exit status."""
    path = _tokens_path(namespace)
    match namespace.token_verb:
        case "new":
            return _new(path, namespace)
        case "list":
            return _list(read_tokens(path))
    return _revoke(path, namespace.id)


def cert(namespace: argparse.Namespace) -> int:
    """Runs `cloud-verifier cert dev` and returns its exit status."""
    from outrider.cloud_verifier.security.dev_certs import make_dev_certificates

    check_tenant(namespace.tenant)
    made = make_dev_certificates(namespace.dir, namespace.host, namespace.tenant)
    host = namespace.host[0] if namespace.host else "localhost"
    listen = "0.0.0.0:7077" if namespace.host else "127.0.0.1:7077"
    ca, (server, server_key), (client, client_key) = made.ca, made.server, made.client
    serve = ["--listen", listen, "--tls-cert", server, "--tls-key", server_key, "--tls-client-ca", ca]
    run = ["--verifier", f"{host}:7077", "--tls-ca", ca, "--tls-cert", client, "--tls-key", client_key]
    if made.replaced:
        kept, new = "the authority stays", "the authority is new too: edges need this ca.crt"
        authority = kept if made.is_authority_kept else new
        print(f"{made.directory}: replaced {', '.join(made.replaced)}; {authority}", file=sys.stderr)
    print(f"{made.directory} has an authority, a server and a client of it until {made.expires:%Y-%m-%d}:")
    for command in (["cloud-verifier", "serve", *serve], ["edge-client", "run", "def", *run]):
        print("  " + shlex.join(map(str, command)))
    return 0


def _tokens_path(namespace: argparse.Namespace) -> Path:
    flags = {"tokens": namespace.tokens} if namespace.tokens else {}
    path = load_config(ServeConfig, scope=SCOPE, yaml_path=namespace.config, flags=flags).value.tokens
    if path is None:
        raise UsageError("which file of tokens? Name it with --tokens FILE, as for `serve`")
    return path


def _new(path: Path, namespace: argparse.Namespace) -> int:
    lifetime = parse_lifetime(namespace.expires)
    text, record = new_token(namespace.tenant, datetime.now(UTC), lifetime, namespace.admin)
    if namespace.out is not None:
        _write_secret(namespace.out, text)
    try:
        change_tokens(path, lambda records: (*records, record))
    except UsageError:
        if namespace.out is not None:
            namespace.out.unlink()
        raise
    until = f"until {_shown(record.expires)}" if record.expires else "without end"
    kind = "an admin token" if record.is_admin else "a token"
    print(f"{record.id} is {kind} of {record.tenant} {until}; {path} has its hash", file=sys.stderr)
    if namespace.out is None:
        print(text)
    return 0


def _write_secret(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"--out {path}: cannot write it: {error.strerror}") from error
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")


def _list(records: Records) -> int:
    now = datetime.now(UTC)
    rows = [("id", "tenant", "for", "created", "expires", "state")]
    for each in sorted(records, key=lambda record: (record.tenant, record.created)):
        what = "admin port" if each.is_admin else "calls"
        rows.append((each.id, each.tenant, what, _shown(each.created), _shown(each.expires), each.state(now)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _revoke(path: Path, token_id: str) -> int:
    now = datetime.now(UTC)

    def change(records: Records) -> list[TokenRecord]:
        if token_id not in {record.id for record in records}:
            raise UsageError(f"{path} has no token {token_id}: `cloud-verifier token list` shows its tokens")
        return [
            replace(each, revoked=each.revoked or now) if each.id == token_id else each for each in records
        ]

    if not path.exists():
        read_tokens(path)  # raises, with what to do
    change_tokens(path, change)
    print(f"{token_id} is revoked; a running verifier knows within a second", file=sys.stderr)
    return 0


def _shown(time: datetime | None) -> str:
    return "never" if time is None else f"{time:%Y-%m-%d %H:%M}"
