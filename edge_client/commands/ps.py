"""Runs `edge-client ps`: lists what a daemon on this machine is generating, a line for each request."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outrider.common.errors import LinkError
from outrider.common.printable import one_line
from outrider.edge_client.config.flags import load_run_config
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.daemon.client import ask_daemon
from outrider.edge_client.daemon.http.keys import read_keys

_COLUMNS = ("ID", "STATE", "MODE", "TOKENS", "TOKENS/S", "ACCEPTED", "RTT", "AGE", "USER")
_EPILOG = """\
The address and the API key are the daemon's own settings: --listen, --config FILE, or the variables
OUTRIDER_EDGE_SERVE_LISTEN and OUTRIDER_EDGE_SERVE_API_KEY. No text of any request is shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `ps`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="print the daemon's answer as JSON")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's YAML file")
    parser.add_argument(
        "--listen",
        dest="serve.listen",
        default=argparse.SUPPRESS,
        metavar="HOST:PORT",
        help="the daemon's address",
    )


def main(namespace: argparse.Namespace) -> int:
    """Prints the list and returns the exit status. Raises `OutriderError`."""
    config = load_run_config(namespace).value
    found = ask_daemon(config.serve.listen, "/v1/sessions", api_key(config))
    try:
        lines = table(found["data"])
        counts = f"{found['running']} of {found['max_running']} running, {found['waiting']} waiting"
        lines.append(one_line(counts))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise LinkError(
            f"what answers at {config.serve.listen} is no edge-client daemon: give its --listen"
        ) from None
    print(json.dumps(found) if namespace.json else "\n".join(lines))
    return 0


def api_key(config: RunConfig) -> str:
    """Returns a key that the daemon takes: the configured one, or the first of its file where that can be
    read."""
    if config.serve.api_key or not config.serve.api_key_file:
        return config.serve.api_key
    return read_keys(Path(config.serve.api_key_file))[0]


def table(sessions: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the list, header first."""
    rows = [_COLUMNS, *(_row(session) for session in sessions)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _row(session: dict[str, Any]) -> tuple[str, ...]:
    rate, rtt = session.get("acceptance_rate"), session.get("rtt_ms")
    speed = session.get("tokens_per_s")
    cells = (
        session["id"],
        session["state"],
        session.get("mode", "-"),
        str(session.get("completion_tokens", "-")),
        "-" if speed is None else f"{speed:.1f}",
        "-" if rate is None else f"{100 * rate:.0f} %",
        "-" if rtt is None else f"{rtt:.1f} ms",
        f"{session['age_s']:.1f} s",
        session.get("user") or "-",
    )
    return tuple(one_line(cell) for cell in cells)
