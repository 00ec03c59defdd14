"""The configuration's flags on a verb, and the configuration they and the rest come to."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.config import Loaded, add_flags, given_flags, load_config
from edge_client.config import SCOPE, RunConfig
from edge_client.daemon.config import SECTION

CONFIG_NOTE = "Flags from --verifier on are also keys of --config FILE and variables OUTRIDER_EDGE_<KEY>."


def add_config(parser: argparse.ArgumentParser, has_serve: bool = False) -> None:
    """`has_serve` adds the flags of the section `serve`; every verb takes that section in its file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, without=() if has_serve else (SECTION,))


def load_run_config(namespace: argparse.Namespace) -> Loaded[RunConfig]:
    """Raises `ConfigError` naming key, origin and what was expected."""
    return load_config(
        RunConfig, scope=SCOPE, yaml_path=namespace.config, flags=given_flags(namespace, RunConfig)
    )
