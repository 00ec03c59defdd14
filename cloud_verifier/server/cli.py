"""The command `cloud-verifier`: serve a target, manage tokens and certificates, show the configuration."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import outrider.common.process.grpc_quiet
import outrider.common.process.short_spins  # noqa: F401  both before anything imports grpc or torch
from outrider.cloud_verifier.backends.model_files import check_model_files
from outrider.cloud_verifier.backends.quantised.choice import find_quantisation, parse_quantize
from outrider.cloud_verifier.config import (
    SCOPE,
    ServeConfig,
    check_device_name,
    parse_kv_memory,
    parse_methods,
)
from outrider.cloud_verifier.security.arguments import add_cert_arguments, add_token_arguments
from outrider.cloud_verifier.server.load_progress import LOADING_THREAD
from outrider.common.config.arguments import VerbParser
from outrider.common.config.loader import Loaded, add_flags, given_flags, load_config
from outrider.common.config.units import parse_size
from outrider.common.errors import ModelError, OutriderError, UsageError
from outrider.common.printable import one_line
from outrider.common.process.extras import needs_extra
from outrider.common.process.outputs import replace_closed_outputs, tell_failed_write
from outrider.common.process.version import own_version

if TYPE_CHECKING:
    from outrider.cloud_verifier.backends.paged_backend import PagedBackend
    from outrider.cloud_verifier.server.entrance import Entrance
    from outrider.cloud_verifier.server.server import VerifierServer

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (failed), 2 (used wrongly), 130 (interrupted while starting)."""
    replace_closed_outputs()
    namespace = _make_parser().parse_args(arguments)
    try:
        with needs_extra("cloud", namespace.verb):
            status = _dispatch(namespace)
        sys.stdout.flush()  # where what cannot be written is still told
        return _end_loading(status)
    except OutriderError as error:
        print(f"cloud-verifier: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _end_loading(130)
    except OSError as error:
        failed = tell_failed_write(error, "cloud-verifier")
        if failed is None:
            raise
        return failed


def _end_loading(status: int) -> int:
    """Returns the exit status, but ends the process here where a signal came while its models were loading: Python
    would wait until kernels are compiled, and abort where it stops a thread in compiled code."""
    if any(thread.name == LOADING_THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _dispatch(namespace: argparse.Namespace) -> int:
    if namespace.verb in ("token", "cert"):
        from outrider.cloud_verifier.security import commands

        return commands.token(namespace) if namespace.verb == "token" else commands.cert(namespace)
    loaded = load_config(
        ServeConfig, scope=SCOPE, yaml_path=namespace.config, flags=given_flags(namespace, ServeConfig)
    )
    if namespace.verb == "config":
        print("\n".join(map(one_line, loaded.lines(with_origins=namespace.origin))))
        return 0
    return _serve(loaded)


def _make_parser() -> argparse.ArgumentParser:
    parser = VerbParser(
        prog="cloud-verifier",
        description="Verify drafted tokens for many edges in one packed forward.",
        epilog="Every flag is also a key of --config FILE and a variable OUTRIDER_VERIFIER_<KEY>.",
    )
    parser.add_argument("--version", action="version", version=f"cloud-verifier {own_version()}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    serve = verbs.add_parser("serve", help="serve a target until SIGTERM or Ctrl-C")
    show = verbs.add_parser("config", help="show the configuration: config show [--origin]")
    show.add_argument("action", choices=("show",))
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    add_token_arguments(verbs.add_parser("token", help="bearer tokens: token new|list|revoke"))
    add_cert_arguments(verbs.add_parser("cert", help="certificates to try TLS with: cert dev"))
    serve.usage = "%(prog)s [OPTION ...]"  # argparse would name every option
    for verb in (serve, show):
        verb.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the keys below")
        add_flags(verb, ServeConfig)
    return parser


def _serve(loaded: Loaded[ServeConfig]) -> int:
    from outrider.common.process.logs import setup_logging
    from outrider.common.process.memory import share_heaps
    from outrider.common.process.tracing import exporting_spans

    config = loaded.value
    setup_logging(config.log_level, config.log_json)
    share_heaps(2)
    begin = time.monotonic()

    from outrider.cloud_verifier.server.addresses import check_ports_free
    from outrider.cloud_verifier.server.entrance import Entrance
    from outrider.cloud_verifier.server.server import run_until_signalled

    kv_bytes = parse_kv_memory(config.kv_memory)
    parse_size(config.draft_kv_memory, "--draft-kv-memory")
    parse_size(config.max_grammar_memory, "--max-grammar-memory")
    parse_size(config.tenant_max_grammar_memory, "--tenant-max-grammar-memory")
    check_device_name(config.device)
    parse_methods(config.methods)
    # It checks addresses and credentials: all of these before the weights are loaded.
    entrance = Entrance(config)
    check_ports_free(config)
    check_directories(config)
    log.info("loading %s", config.target)

    def announce(server: VerifierServer) -> None:
        backend = cast("PagedBackend", server.engine.backend)
        host = config.listen.rpartition(":")[0]
        what = describe_target(backend)
        took = f"after {time.monotonic() - begin:.1f} s"
        admin = f", admin port at {server.admin.url}" if server.admin is not None else ""
        line = f"cloud-verifier {own_version()} {took}, serving {what} on {host}:{server.port}{admin}"
        print(one_line(line), flush=True)

    with exporting_spans(config.otlp_endpoint, "cloud-verifier"):
        run_until_signalled(entrance, lambda: load_server(config, kv_bytes, entrance), announce)
    return 0


def load_server(config: ServeConfig, kv_bytes: int | None, entrance: Entrance) -> VerifierServer:
    """Returns the server of the target and the draft that `config` names. Raises `ModelError`."""
    from outrider.cloud_verifier.server.loading import create_grammars, load_models
    from outrider.cloud_verifier.server.server import VerifierServer

    backend, drafter = load_models(config, kv_bytes)
    return VerifierServer(backend, config, drafter, entrance, grammars=create_grammars(config, backend))


def describe_target(backend: PagedBackend) -> str:
    """Returns the start line's words on the target, its KV pool and its memory."""
    from outrider.cloud_verifier.engine.observe import memory_use
    from outrider.common.process.memory import show_memory

    rows = "reproducible" if backend.is_reproducible else "not reproducible"
    if backend.row_plan is not None and backend.device != "cpu":
        first, last = backend.row_plan.counts[0], backend.row_plan.most
        counts = f"{first}" if first == last else f"{first} to {last}"
        rows += f" in products of {counts} rows by {backend.product_way}"
    through = "through transformers, " if backend.decoder.is_of_transformers else ""
    slow = (
        "" if backend.device == "cpu" or backend.has_paged_kernel else " without the paged attention kernel"
    )
    quantised = f", {backend.quantisation} weights" if backend.quantisation else ""
    kv = f"KV pool of {backend.num_kv_tokens:,} tokens{' in FP8' if backend.facts.has_fp8_kv else ''}"
    what = f"{through}{backend.dtype}{quantised}, {rows}, {backend.device}{slow}"
    return f"{backend.model_id} ({what}, context {backend.max_context}, {kv}; {show_memory(memory_use(backend))})"


def check_directories(config: ServeConfig) -> None:
    """Raises `UsageError` for a directory that is no model, `ModelError` for weights quantised in a way that is not
    served, before anything is loaded."""
    try:
        config_json = check_model_files(config.target)
    except ModelError as error:
        raise UsageError(f"--target: {error}: want a Hugging Face directory with safetensors") from error
    find_quantisation(config_json, parse_quantize(config.quantize), config.target.name)
    if config.draft_dir is not None and not config.draft_dir.is_dir():
        hint = "`edge-client draft export` makes one, and --draft none does without"
        raise UsageError(f"--draft {config.draft_dir}: there is no such directory: {hint}")
    for path in config.heads:
        if not Path(path).is_dir():
            hint = "`python -m outrider.training.heads` makes one"
            raise UsageError(f"--heads {path}: there is no such directory: {hint}")


if __name__ == "__main__":
    sys.exit(main())
