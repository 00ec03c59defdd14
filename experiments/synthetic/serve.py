"""A verifier of a synthetic pair: `python -m outrider.experiments.synthetic.serve --t-target 30ms --alpha 0.8`.

The product's own server, engine and codec; it takes every flag of `cloud-verifier serve` (those about weights
change nothing) and prints the same line when it serves. With no times given a forward costs nothing, so that
what is left is everything but the model.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.cloud_verifier.config import SCOPE, ServeConfig
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.server.entrance import Entrance
from outrider.cloud_verifier.server.server import VerifierServer, run_until_signalled
from outrider.common.config.loader import add_flags, given_flags, load_config
from outrider.common.config.units import parse_duration
from outrider.common.process.logs import setup_logging
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.processes import VerifierProcess, start_server
from outrider.experiments.synthetic.draft import SyntheticDraft
from outrider.experiments.synthetic.pair import DEFAULT_ALPHA, SyntheticPair, parse_alphas
from outrider.experiments.synthetic.target import SyntheticBackend


def create_server(
    pair: SyntheticPair, config: ServeConfig, entrance: Entrance | None = None
) -> VerifierServer:
    """Returns a server with a co-located draft; its model info carries the labels of the pair."""
    backend = SyntheticBackend(pair)
    draft = SyntheticDraft(replace(pair, draft_token_s=pair.colocated_draft_s))
    drafter = CoLocatedDrafter(draft)
    return VerifierServer(backend, config, drafter, entrance, labels=tuple(pair.labels))


@contextlib.contextmanager
def running_synthetic(
    pair: SyntheticPair, *flags: str, listen: str = "127.0.0.1:0"
) -> Iterator[VerifierProcess]:
    """Runs a verifier in a process of its own: `with running_synthetic(pair) as verifier: ...
    verifier.address`."""
    verifier = start_server(serve_command(pair, *flags, listen=listen))
    try:
        yield verifier
    finally:
        verifier.stop()


def serve_command(pair: SyntheticPair, *flags: str, listen: str = "127.0.0.1:0") -> list[str]:
    """Returns the command that serves a pair."""
    command = [sys.executable, "-m", "outrider.experiments.synthetic.serve", *pair.flags()]
    return [*command, "--listen", listen, "--admin-listen", "none", "--log-level", "warning", *flags]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.synthetic.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--t-target", default="0", metavar="T", help="of a forward: 30ms; default 0")
    parser.add_argument("--t-verify-token", default="0", metavar="T", help="more for each further token")
    parser.add_argument("--t-draft", default="0", metavar="T", help="of a co-located drafted token")
    parser.add_argument(
        "--alpha",
        default=str(DEFAULT_ALPHA),
        metavar="A[,A...]",
        help=f"chance of a co-located drafted token to stand, by position; default {DEFAULT_ALPHA}",
    )
    parser.add_argument("--synthetic-seed", type=int, default=0, metavar="N", help="of the text")
    add_flags(parser, ServeConfig)
    namespace = parser.parse_args(arguments)
    flags = given_flags(namespace, ServeConfig)
    config = load_config(ServeConfig, scope=SCOPE, flags=flags).value
    setup_logging(config.log_level, config.log_json)
    pair = SyntheticPair(
        alphas=parse_alphas(namespace.alpha, "--alpha"),
        draft_token_s=parse_duration(namespace.t_draft, "--t-draft"),
        target_s=parse_duration(namespace.t_target, "--t-target"),
        verify_token_s=parse_duration(namespace.t_verify_token, "--t-verify-token"),
        seed=namespace.synthetic_seed,
    )

    def announce(server: VerifierServer) -> None:
        admin = f", admin port at {server.admin.url}" if server.admin is not None else ""
        host = config.listen.rpartition(":")[0]
        print(f"synthetic verifier, serving {pair.labels[1]} on {host}:{server.port}{admin}", flush=True)

    entrance = Entrance(config)
    run_until_signalled(entrance, lambda: create_server(pair, config, entrance), announce)
    return 0


if __name__ == "__main__":
    run_command("synthetic.serve", main)
