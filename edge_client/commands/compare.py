"""`edge-client draft compare A B C`: measures drafts with a verifier on text of the user's, and recommends one."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.common.config.loader import add_flags, with_values
from outrider.common.config.units import parse_duration, show_duration
from outrider.common.errors import UsageError
from outrider.common.process.progress import show_progress
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.registry import MODEL, RETRIEVAL, STRATEGIES

if TYPE_CHECKING:
    from outrider.edge_client.planning.compare import ComparedDraft, Comparison
    from outrider.edge_client.planning.measure import Prompt
    from outrider.edge_client.session.factory import Edge

_NUM_PROMPTS, _PROMPT_TOKENS = 16, 64  # of the user's text
_SETTINGS = frozenset(  # of a run that a measurement uses
    (
        "verifier",
        "lookup_ngram",
        "suffix_tokens",
        "datastore",
        "draft_threads",
        "draft_backend",
        "draft_device",
        "draft_weights",
        "draft_kv_dtype",
    )
    + ("temperature", "top_k", "top_p", "method", "support_size", "transport", "seed", "log_level")
    + ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure_token")
)
_DESCRIPTION = """Measure drafts with a verifier, on the same texts in turn, and recommend the fastest: tokens a round,
and tokens/s predicted by `plan`'s cost model on the link as it is and at other round trips.

  edge-client draft compare drafts/a drafts/b prompt-lookup --verifier 127.0.0.1:7077 --text notes/*.md --rtt 30ms 100ms
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `draft compare`."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.usage = (
        "%(prog)s DRAFT [DRAFT ...] --verifier HOST:PORT [OPTION ...]"  # argparse would name every option
    )
    parser.add_argument(
        "drafts",
        nargs="+",
        metavar="DRAFT",
        help=f"directory of a draft, or a strategy: {', '.join(name for name in STRATEGIES if name != MODEL)}; a "
        "strategy takes its tokenizer, and its model if it has one, from the first directory, or is the embedded one",
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help='text of the kind that will be generated: UTF-8, or .jsonl with "text" or "prompt" on every line; '
        "default: the prompts of plan --measure",
    )
    parser.add_argument(
        "--rtt", nargs="+", default=[], metavar="T", help="round trips to predict speeds at: 30ms 100ms"
    )
    parser.add_argument(
        "--measure-s", type=float, default=12.0, metavar="S", help="for each draft; default 12"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, only=_SETTINGS)


def main(namespace: argparse.Namespace) -> int:
    """Prints the comparison and returns 0, whether drafting pays or not. Raises `OutriderError`."""
    from outrider.common.process.logs import setup_logging
    from outrider.edge_client.config.flags import load_run_config
    from outrider.edge_client.planning.compare import compare, measure_drafts
    from outrider.edge_client.transport.link.probe import probe
    from outrider.edge_client.transport.link.security import link_security

    if not 0 < namespace.measure_s < math.inf:
        raise UsageError(f"--measure-s {namespace.measure_s}: want seconds above 0")
    rtts_s = [parse_duration(each, "--rtt") for each in namespace.rtt]
    configs = _candidates(namespace.drafts, load_run_config(namespace).value)
    config = next(iter(configs.values()))
    setup_logging(config.logs.level)
    probe(config.verifier, link_security(config.connection, config.verifier), count=1)
    with contextlib.ExitStack() as stack:
        edges = _open(configs, stack)
        stack.callback(show_progress, "")
        samples = measure_drafts(
            edges,
            prompts=_prompts(namespace.text, next(iter(edges.values()))),
            seconds=namespace.measure_s,
            on_progress=lambda share, name: show_progress(f"measuring: {share:.0%}, {name}"),
        )
    found = compare(samples, rtts_s)
    print(json.dumps(comparison_json(found)) if namespace.json else comparison_text(found))
    return 0


def _candidates(names: Sequence[str], config: RunConfig) -> dict[str, RunConfig]:
    """Returns a configuration for each. Raises `UsageError` for what is no directory and no strategy, and for one that
    is named twice."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{twice[0]} is named twice")
    directories = [name for name in names if Path(name).is_dir()]
    found = {}
    for name in names:
        if name in directories:
            values = {"draft": name, "draft_strategy": MODEL}
        elif name in STRATEGIES and name != MODEL:
            values = {"draft": directories[0] if directories else "", "draft_strategy": name}
        else:
            known = ", ".join(each for each in STRATEGIES if each != MODEL)
            raise UsageError(f"{name} is no directory, and no strategy ({known})")
        found[name] = with_values(replace(config, mode=ExecutionMode.SPECULATIVE), **values)
    is_read = any(RETRIEVAL in each.draft.strategy.split("+") for each in found.values())
    if config.draft.datastore is not None and not is_read:
        raise UsageError(f"--datastore goes with a draft that has {RETRIEVAL} in it: none is compared")
    return found


def _open(configs: Mapping[str, RunConfig], stack: contextlib.ExitStack) -> dict[str, Edge]:
    """Returns the candidates, loaded. Raises `UsageError` where two have different tokenizers."""
    from outrider.edge_client.session.factory import create_edge

    edges: dict[str, Edge] = {}
    for name, config in configs.items():
        show_progress(f"loading {name}")
        edges[name] = create_edge(config)
        stack.callback(edges[name].close)
    first, *others = edges
    for name in others:
        if edges[name].tokenizer.fingerprint != edges[first].tokenizer.fingerprint:
            raise UsageError(f"{first} and {name} have different tokenizers: only one can be the verifier's")
    return edges


def _prompts(files: Sequence[Path], edge: Edge) -> Sequence[Prompt]:
    from outrider.edge_client.calibration.passages import cut_passages, read_texts
    from outrider.edge_client.planning.measure import PROMPTS

    if not files:
        return PROMPTS
    cut = cut_passages(
        read_texts(files).documents,
        edge.tokenizer.encode,
        num_passages=_NUM_PROMPTS,
        num_prompt_tokens=_PROMPT_TOKENS,
        num_following_tokens=0,
        needs_following=False,
    )
    return [each.prompt_ids for each in cut]


# ------------------------------------------------------------------------------------------- what is printed


def comparison_text(found: Comparison) -> str:
    """Returns the recommendation and a table; directories by their last part, where that says which."""
    found = _with_short_names(found)
    first_s = found.rtts_s[0]
    width = max(5, *(len(each.name) for each in found.drafts)) + 1
    columns = ["as measured", *(f"RTT {show_duration(rtt_s)}" for rtt_s in found.rtts_s[1:])]
    head = f"{'draft':<{width}}{'ms/drafted':>11}{'tokens/round':>14}"
    lines = [head + "".join(f"{f'tokens/s, {each}':>26}" for each in columns)]
    for each in found.ranked(first_s):
        parts = each.measured.parts
        row = f"{each.name:<{width}}{parts.draft_token.value * 1e3:>11.2f}{each.tokens_per_round:>14.2f}"
        for rtt_s in found.rtts_s:
            best = each.best(rtt_s)
            speed = f"{best.tokens_per_s:.1f} ({best.mode} {best.num_draft_tokens})"
            row += f"{speed:>26}"
        lines.append(row)
    alone = "".join(
        f"{f'{found.cloud_only(rtt_s).tokens_per_s:.1f} (streamed)':>26}" for rtt_s in found.rtts_s
    )
    lines.append(f"{'none':<{width}}{'':>25}{alone}")
    rtt = found.drafts[0].measured.parts.rtt
    lines.append(
        f"as measured: RTT {show_duration(rtt.value)}; speeds are predicted from what was measured; the target alone "
        f"took times that differ by {found.noise_share:.0%} from draft to draft"
    )
    return "\n".join([*(_sentence(found, rtt_s) for rtt_s in found.rtts_s), "", *lines])


def _with_short_names(found: Comparison) -> Comparison:
    names = [Path(each.name).name or each.name for each in found.drafts]
    if len(set(names)) < len(names):
        return found
    return replace(
        found, drafts=tuple(replace(each, name=name) for each, name in zip(found.drafts, names, strict=True))
    )


def _sentence(found: Comparison, rtt_s: float) -> str:
    where = "On this link" if rtt_s == found.rtts_s[0] else f"At {show_duration(rtt_s)}"
    draft, alone = found.recommended(rtt_s), found.cloud_only(rtt_s)
    if draft is None:
        fastest = found.ranked(rtt_s)[0]
        best = fastest.best(rtt_s)
        return (
            f"{where} no draft pays: the target alone writes {alone.tokens_per_s:.1f} tokens/s, with {fastest.name} "
            f"{best.tokens_per_s:.1f}. To run so: edge-client run --mode cloud-only"
        )
    best = draft.best(rtt_s)
    ratio = alone.token_s / best.token_s
    text = f"{where}: {draft.name}, {best.tokens_per_s:.1f} tokens/s, {ratio:.2f} times the target alone"
    if close := found.close_to(rtt_s):
        text += f"; not told apart from {', '.join(close)}"
    return f"{text}."


def comparison_json(found: Comparison) -> dict[str, Any]:
    """Returns the comparison with times in ms; `recommended` is null where the target alone is faster."""
    measured_s = found.rtts_s[0]
    return {
        "schema": 1,
        "rtt_ms": measured_s * 1e3,
        "noise_share": found.noise_share,
        "recommended": _name(found.recommended(measured_s)),
        "drafts": [_draft_json(each, found) for each in found.ranked(measured_s)],
        "at": [
            {
                "rtt_ms": rtt_s * 1e3,
                "recommended": _name(found.recommended(rtt_s)),
                "not_told_apart": found.close_to(rtt_s),
                "cloud_only_tokens_per_s": found.cloud_only(rtt_s).tokens_per_s,
            }
            for rtt_s in found.rtts_s
        ],
    }


def _name(draft: ComparedDraft | None) -> str | None:
    return None if draft is None else draft.name


def _draft_json(draft: ComparedDraft, found: Comparison) -> dict[str, Any]:
    parts = draft.measured.parts
    return {
        "name": draft.name,
        "draft_ms_per_token": parts.draft_token.value * 1e3,
        "tokens_per_round": draft.tokens_per_round,
        "acceptance": [each.value for each in parts.acceptance],
        "predicted": [
            {
                "rtt_ms": rtt_s * 1e3,
                "mode": draft.best(rtt_s).mode,
                "num_draft_tokens": draft.best(rtt_s).num_draft_tokens,
                "tokens_per_s": draft.best(rtt_s).tokens_per_s,
            }
            for rtt_s in found.rtts_s
        ],
    }
