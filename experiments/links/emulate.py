"""A link to use by hand: prints the address to dial instead of the verifier's, until Ctrl-C.

python -m outrider.experiments.links.emulate --profile 4g --upstream 127.0.0.1:7077
edge-client run --verifier ADDRESS "..."
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import threading
from typing import Any

from outrider.common.config.addresses import split_address
from outrider.common.errors import UsageError
from outrider.experiments.links.base import REALISATIONS, check_realisable, create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.links.profiles import NAMED, load_profile
from outrider.experiments.shared.command import run_command


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.links.emulate",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Profiles: " + ", ".join(NAMED),
    )
    parser.add_argument("--profile", default="4g", metavar="NAME", help="default: 4g")
    example = "such as rtt_ms=80 loss=0.01"
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="FIELD=VALUE", help=example)
    parser.add_argument("--upstream", default="127.0.0.1:7077", metavar="HOST:PORT", help="the verifier")
    parser.add_argument("--realisation", default="proxy", choices=REALISATIONS[1:])
    return parser.parse_args()


def _chosen_profile(name: str, changes: list[str]) -> LinkProfile:
    import yaml

    fields: dict[str, Any] = {"base": name}
    for change in changes:
        field, equals, value = change.partition("=")
        try:
            fields[field] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(
                f"--set {change}: the value is not YAML: give a number, a word or a list"
            ) from error
        if not equals:
            raise UsageError(f"--set {change}: want FIELD=VALUE, such as rtt_ms=80")
    return load_profile(fields)


def main() -> int:
    """Runs the command."""
    arguments = _parse_arguments()
    profile = _chosen_profile(arguments.profile, arguments.set)
    split_address(arguments.upstream, "--upstream")
    realisation = create_realisation(arguments.realisation)
    check_realisable(realisation, profile)
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    with realisation.open(profile, arguments.upstream) as link:
        differs = {
            field.name: getattr(profile, field.name)
            for field in dataclasses.fields(profile)
            if getattr(profile, field.name) != field.default
        }
        print("  ".join(f"{name} {value}" for name, value in differs.items()))
        where = f"dial {link.address} to reach {arguments.upstream} over {profile.name}"
        print(f"{where}; Ctrl-C ends it", flush=True)
        is_over.wait()
        up, down = link.wire_bytes() or (0, 0)
    print(f"\ncarried {up:,} bytes up and {down:,} down")
    return 0


if __name__ == "__main__":
    run_command("emulate", main)
