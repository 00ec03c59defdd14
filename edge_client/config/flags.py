"""The configuration's flags on a verb, and the configuration they and the rest come to."""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.common.config.loader import Loaded, add_flags, given_flags, load_config
from outrider.edge_client.config.run_config import SCOPE, RunConfig
from outrider.edge_client.config.serve import SECTION

_TITLES = {
    "verifier and draft": "verifier draft draft_strategy lookup_ngram draft_threads min_draft_ms",
    "who works, and how far ahead": "mode depth_policy num_speculative_tokens pipeline num_rounds_in_flight "
    "guesses",
    "sampling": "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "logit_bias bad_word seed logprobs",
    "where the text ends": "max_new_tokens min_new_tokens stop stop_token_id ignore_eos",
    "how drafted tokens are judged": "method support_size num_candidates threshold_pass threshold_ratio "
    "typical_epsilon typical_delta",
    "what the draft is unsure of": "gate gate_nll gate_entropy gate_margin gate_variance gate_max_hard_ratio "
    "gate_rules gate_ner gate_rare_per_million gate_file",
    "encryption and credentials": "tls tls_ca tls_cert tls_key tls_server_name token_file insecure_token",
    "when the link fails": "on_timeout timeout_ms recover_timeout_s reverify allow_target_change transport",
    "logs and traces": "log_level otlp_endpoint",
}
_TITLE_OF = {name: title for title, names in _TITLES.items() for name in names.split()}
COLOUR_NOTE = (
    "On a terminal green was drafted here and confirmed there, yellow is the target's correction, red and "
    "underlined is unverified; NO_COLOR=1 turns colours off."
)
CONFIG_NOTE = "Flags from --verifier on are also keys of --config FILE and variables OUTRIDER_EDGE_<KEY>."


def add_config(parser: argparse.ArgumentParser, words: str = "", has_serve: bool = False) -> None:
    """`words` are what the verb takes beside options. `has_serve` adds the flags of the section `serve`;
    every verb takes that section in its file."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, without=() if has_serve else (SECTION,), title_of=_title_of)
    parser.usage = f"%(prog)s [OPTION ...] {words}".rstrip()  # argparse would name every option


def load_run_config(namespace: argparse.Namespace) -> Loaded[RunConfig]:
    """Raises `ConfigError` naming key, origin and what was expected."""
    return load_config(
        RunConfig, scope=SCOPE, yaml_path=namespace.config, flags=given_flags(namespace, RunConfig)
    )


def _title_of(key: str) -> str:
    section, _, _ = key.rpartition(".")
    return "the daemon" if section == SECTION else _TITLE_OF.get(key, "further settings")
