"""Adds the configuration's flags to a verb, and loads the configuration that they and the other sources
give."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.common.config.loader import Loaded, add_flags, given_flags, load_config
from outrider.edge_client.config.daemon import SECTION
from outrider.edge_client.config.run_config import SCOPE, RunConfig

COLOUR_NOTE = (
    "On a terminal, accepted drafts are green, the target's corrections yellow, unverified tokens red and "
    "underlined; NO_COLOR=1 turns colours off."
)
CONFIG_NOTE = "Flags from --verifier on are also keys of --config FILE and variables OUTRIDER_EDGE_<KEY>."


def add_config(parser: argparse.ArgumentParser, words: str = "", has_serve: bool = False) -> None:
    """Adds the flags. `words` are the verb's arguments beside options. `has_serve` adds the flags of the
    section `serve`, which every verb takes in its file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, without=() if has_serve else (SECTION,), is_grouped=True)
    parser.usage = f"%(prog)s [OPTION ...] {words}".rstrip()  # argparse would name every option


def load_run_config(namespace: argparse.Namespace) -> Loaded[RunConfig]:
    """Returns the configuration. Raises `ConfigError` naming key, origin and what was expected."""
    return load_config(
        RunConfig, scope=SCOPE, yaml_path=namespace.config, flags=given_flags(namespace, RunConfig)
    )
