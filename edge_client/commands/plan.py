"""`edge-client plan`: what this link and these models will give; from flags alone, or from a live link."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outrider.common.config.loader import add_flags
from outrider.common.config.units import parse_duration, parse_rate, parse_share
from outrider.common.errors import UsageError
from outrider.edge_client.commands.progress import show_progress
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.planning.plan import ASSUMED, GIVEN, MAX_DRAFT_TOKENS, Known, PlanParts, make_plan
from outrider.edge_client.planning.report import plan_json, plan_text
from outrider.edge_client.planning.samples import Standing

_DURATIONS = {  # by part: flag, and what it is
    "draft_token": ("--t-draft", "a token of the draft, at the edge"),
    "draft_fixed": ("--t-draft-round", "more for a round that drafts; default 0"),
    "target_token": ("--t-target", "a token of the target by itself"),
    "verify_fixed": ("--t-verify", "a verification, without --t-verify-token; default --t-target"),
    "verify_token": ("--t-verify-token", "more for each drafted token; default 0"),
    "colocated_draft_token": ("--t-draft-colocated", "the same beside the target; default --t-draft"),
    "rtt": ("--rtt", "round trip of a small message"),
}
_EXAMPLES = {"--t-draft": "10ms", "--t-target": "70ms", "--rtt": "50ms", "--alpha": "0.8"}
_MEASURING = frozenset(  # settings of a run that a measurement uses
    ("draft", "draft_strategy", "lookup_ngram", "draft_threads", "temperature", "top_k", "top_p", "method")
    + ("support_size", "transport", "min_draft_ms", "seed", "log_level")
    + ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure_token")
)
_DESCRIPTION = """Say what a link and two models will give, by the cost model: the best draft length, ms a
token in every mode, and the round trip below which drafting at the edge pays. Needs no models and no network:

  edge-client plan --t-draft 10ms --t-target 70ms --rtt 50ms --alpha 0.8
  edge-client plan --measure 127.0.0.1:7077"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    for flag, what in _DURATIONS.values():
        parser.add_argument(flag, metavar="T", help=f"{what} (10ms, 1.5s, 800us)")
    parser.add_argument(
        "--alpha",
        metavar="A[,A...]",
        help="chance of a drafted token to stand, given that those before it do: 0.8, or by position "
        "0.9,0.8,0.7 (the last repeats)",
    )
    parser.add_argument("--bandwidth-up", metavar="R", help="edge to cloud: 10mbit; default no limit")
    parser.add_argument("--bandwidth-down", metavar="R", help="cloud to edge")
    parser.add_argument(
        "--max-draft-tokens",
        type=int,
        default=MAX_DRAFT_TOKENS,
        metavar="N",
        help=f"longest draft to consider; default {MAX_DRAFT_TOKENS}",
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        metavar="P",
        help="of the target's machine: adds the cost of a million tokens",
    )
    parser.add_argument(
        "--measure",
        metavar="HOST:PORT",
        help="take what is not given from this verifier and the configured draft, over the link as it is",
    )
    parser.add_argument("--measure-s", type=float, default=12.0, metavar="S", help="for so long; default 12")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="to measure with; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, only=_MEASURING)


def main(namespace: argparse.Namespace) -> int:
    """Returns 0 whether speculation pays or not; `OutriderError` says what is wrong."""
    given = _given(namespace)
    price = namespace.price_per_hour
    if namespace.max_draft_tokens < 1:
        raise UsageError(f"--max-draft-tokens {namespace.max_draft_tokens}: want at least 1")
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price-per-hour {price}: want a price of at least 0")
    parts, labels, more = _measure(namespace, given) if namespace.measure else (_complete(given), (), {})
    plan = make_plan(parts, namespace.max_draft_tokens)
    if namespace.json:
        print(json.dumps(plan_json(plan, price_per_hour=price, labels=labels, more=more)))
        return 0
    # NO_COLOR is no setting of ours but a convention of terminals (no-color.org).
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(plan_text(plan, price_per_hour=price, labels=labels, is_coloured=is_coloured))
    return 0


# ------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True, slots=True)
class _Given:
    """What flags say; None: nothing."""

    draft_token: Known | None = None
    draft_fixed: Known | None = None
    target_token: Known | None = None
    verify_fixed: Known | None = None
    verify_token: Known | None = None
    colocated_draft_token: Known | None = None
    rtt: Known | None = None
    rate_up: Known | None = None
    rate_down: Known | None = None
    acceptance: tuple[Known, ...] = ()
    texts: tuple[Standing, ...] = ()


def _given(namespace: argparse.Namespace) -> _Given:
    found: dict[str, Any] = {}
    for field_name, (flag, _) in _DURATIONS.items():
        if (text := getattr(namespace, _dest(flag))) is not None:
            found[field_name] = Known(parse_duration(text, flag), GIVEN)
    for field_name, flag in (("rate_up", "--bandwidth-up"), ("rate_down", "--bandwidth-down")):
        if (text := getattr(namespace, _dest(flag))) is not None:
            found[field_name] = Known(parse_rate(text, flag), GIVEN)
    if namespace.alpha is not None:
        alphas = [parse_share(part.strip(), "--alpha") for part in namespace.alpha.split(",")]
        found["acceptance"] = tuple(Known(alpha, GIVEN) for alpha in alphas)
    if (target := found.get("target_token")) is not None and not target.value:
        raise UsageError(f"--t-target {namespace.t_target}: want a time above 0")
    return _Given(**found)


def _complete(given: _Given) -> PlanParts:
    """With what may be left out assumed. Raises `UsageError` for what may not."""
    needed = {
        "--t-draft": given.draft_token,
        "--t-target": given.target_token,
        "--rtt": given.rtt,
        "--alpha": given.acceptance or None,
    }
    if missing := [flag for flag, known in needed.items() if known is None]:
        example = " ".join(f"{flag} {_EXAMPLES[flag]}" for flag in missing)
        raise UsageError(
            f"plan needs {', '.join(missing)}: give for example {example}; "
            "or --measure HOST:PORT takes it from a verifier and the draft"
        )
    draft, target, rtt = given.draft_token, given.target_token, given.rtt
    assert draft is not None and target is not None and rtt is not None
    unlimited = Known(math.inf, ASSUMED)
    return PlanParts(
        draft_token=draft,
        draft_fixed=given.draft_fixed or Known(0.0, ASSUMED),
        target_token=target,
        verify_fixed=given.verify_fixed or Known(target.value, ASSUMED),
        verify_token=given.verify_token or Known(0.0, ASSUMED),
        colocated_draft_token=given.colocated_draft_token or Known(draft.value, ASSUMED),
        rtt=rtt,
        rate_up=given.rate_up or unlimited,
        rate_down=given.rate_down or unlimited,
        acceptance=given.acceptance,
        texts=given.texts,
    )


def _measure(
    namespace: argparse.Namespace, given: _Given
) -> tuple[PlanParts, tuple[str, ...], dict[str, Any]]:
    """What flags leave open, measured; labels of both ends; and what JSON says of the measurement."""
    from outrider.common.process.logs import setup_logging
    from outrider.edge_client.config.flags import load_run_config
    from outrider.edge_client.planning.measure import PROMPTS, measure, parts_from
    from outrider.edge_client.session.factory import create_edge

    seconds = namespace.measure_s
    if not 0 < seconds < math.inf:
        raise UsageError(f"--measure-s {seconds}: want seconds above 0")
    config = replace(load_run_config(namespace).value, verifier=namespace.measure, mode="speculative")
    setup_logging(config.log_level)
    edge = create_edge(config)
    try:
        prompts = namespace.prompt or PROMPTS
        samples = measure(edge, prompts=prompts, seconds=seconds, on_progress=_progress(seconds))
    finally:
        edge.close()
        show_progress("")
    parts = parts_from(samples)
    known = {f.name: getattr(given, f.name, ()) or getattr(parts, f.name) for f in fields(parts)}
    if given.acceptance:
        known["texts"] = ()
    model = samples.model
    labels = (*edge.labels, *(model.labels if model else ()))
    about = {"verifier": namespace.measure, "seconds": seconds, "num_rounds": len(samples.rounds)}
    about["target"] = f"{model.model_id} ({model.dtype}, {model.device})" if model else ""
    return _complete(replace(given, **known)), labels, {"measured": about}


def _progress(seconds: float) -> Callable[[float, int], None]:
    """A line on stderr that a terminal shows while it measures."""
    last_percent = -1

    def show(share: float, num_rounds: int) -> None:
        nonlocal last_percent
        if (percent := int(100 * share)) != last_percent:
            last_percent = percent
            show_progress(f"measuring for {seconds:g} s: {percent} %, {num_rounds} rounds")

    return show


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
