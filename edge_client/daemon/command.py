"""`edge-client serve`: an OpenAI-compatible endpoint on this machine."""

from __future__ import annotations

import argparse
import socket
import sys
from typing import TYPE_CHECKING

from outrider.common.config.loader import Loaded
from outrider.common.process.extras import needs_extra
from outrider.common.process.logs import setup_logging
from outrider.common.process.memory import share_heaps
from outrider.edge_client.config.flags import add_config, load_run_config, with_serve_defaults
from outrider.edge_client.config.run_config import RunConfig

if TYPE_CHECKING:
    from outrider.edge_client.daemon.service import Daemon

_DESCRIPTION = """\
Answers OpenAI's HTTP interface on this machine: drafts here, verifies at --verifier. A client of
OpenAI's, or of what llama-server, ollama and vLLM have under /v1, can use it; GET / is a page to try it in a browser.

  POST /v1/completions, /v1/chat/completions     streamed or whole
  GET  /v1/models, /v1/sessions                  what is served, who is served
  GET  /health, /ready, /metrics                 for a supervisor and for Prometheus"""
_EPILOG = """\
signals:
  SIGTERM, SIGINT  stop: take nothing new, let running requests finish (--stop-grace-s); a second one hurries
  SIGHUP           read the configuration again: file, environment and the flags of this call. The draft and
                   its cache, the address, --insecure, --min-draft-ms, --otlp-endpoint and the log's form need
                   a restart; everything else changes for new requests

files and variables:
  Every flag is also a key of --config FILE and a variable OUTRIDER_EDGE_<KEY>; those from --listen on are
  in the section `serve`, and their variables begin with OUTRIDER_EDGE_SERVE_. An API key itself goes into
  OUTRIDER_EDGE_SERVE_API_KEY or, one a line, into --api-key-file.

examples:
  edge-client serve --verifier cloud.example:7077
  curl -N http://127.0.0.1:7079/v1/completions -d '{"prompt": "def add(", "stream": true}'
  OPENAI_BASE_URL=http://127.0.0.1:7079/v1 OPENAI_API_KEY=none python your_program.py

see also: edge-client ps, edge-client doctor, docs/daemon.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `serve`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config(parser, has_serve=True)


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status. Raises `OutriderError` where it cannot start."""
    loaded = load_daemon_config(namespace)
    setup_logging(loaded.value.logs.level, json=loaded.value.serve.log_json, stream=sys.stderr)
    _require_packages()
    share_heaps(1)
    from prometheus_client import disable_created_metrics

    from outrider.common.process.tracing import exporting_spans
    from outrider.edge_client.daemon.http.server import open_socket, run_until_signalled
    from outrider.edge_client.daemon.service import Daemon

    # A second series for each counter, which nobody here reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    with exporting_spans(loaded.value.logs.otlp_endpoint, "edge-client"):
        daemon = Daemon(lambda: load_daemon_config(namespace))
        listener = open_socket(daemon.serve.listen)
        try:
            run_until_signalled(daemon, listener, lambda: _say_ready(daemon, listener))
        finally:
            listener.close()
            daemon.close()
    return 0


def load_daemon_config(namespace: argparse.Namespace) -> Loaded[RunConfig]:
    """Returns the configuration, with the defaults of `serve`. Raises `ConfigError`."""
    return with_serve_defaults(load_run_config(namespace))


def _say_ready(daemon: Daemon, listener: socket.socket) -> None:
    if not listener.fileno() >= 0:  # it ended before it began
        return
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    name, verifier = daemon.serve.model_name, daemon.config.verifier
    print(f"serving {name} on {address}, verifier at {verifier}", flush=True)


def _require_packages() -> None:
    """Raises `UsageError` before anything is loaded; the modules that need these are imported later."""
    with needs_extra("daemon", "serve"):
        import jinja2  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
