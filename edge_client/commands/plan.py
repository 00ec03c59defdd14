"""`edge-client plan`: predicts what a link and two models give, from flags alone or from a live link."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from outrider.common.config.loader import add_flags, given_flags, with_values
from outrider.common.config.units import (
    parse_bandwidth,
    parse_duration,
    parse_flops,
    parse_num_params,
    parse_rate,
    parse_share,
    parse_size,
)
from outrider.common.errors import UsageError
from outrider.common.process.progress import show_progress
from outrider.common.types import Method
from outrider.edge_client.config.flags import add_grammar_files
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.settings import MAX_DEPTH, SETTINGS
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.memory import (
    KV,
    USUAL_GPUS,
    WEIGHTS,
    MemoryPlan,
    memory_json,
    memory_text,
    nearest_shape,
    parse_kv_heads,
)
from outrider.edge_client.planning.plan import (
    COMPUTED,
    GIVEN,
    MOST_DRAFT_TOKENS,
    Known,
    PlanParts,
    complete_parts,
    make_plan,
)
from outrider.edge_client.planning.report import plan_json, plan_text
from outrider.edge_client.planning.roofline import Roofline
from outrider.edge_client.planning.samples import AcceptanceSequence, SourceRounds

_DURATIONS = {  # by part: flag, and what it is
    "draft_token": ("--t-draft", "a token of the draft, at the edge"),
    "draft_fixed": ("--t-draft-round", "more for a round that drafts; default 0"),
    "target_token": ("--t-target", "a token of the target by itself"),
    "verify_fixed": ("--t-verify", "a verification, without --t-verify-token; default --t-target"),
    "verify_token": ("--t-verify-token", "more for each drafted token; default 0"),
    "colocated_draft_token": ("--t-draft-colocated", "the same beside the target; default --t-draft"),
    "tree_base": ("--t-tree", "drafting a tree, without --t-tree-node; default as 8 drafted tokens"),
    "tree_node": ("--t-tree-node", "more for each node of it; default 0.6 of a drafted token"),
    "rtt": ("--rtt", "round trip of a small message"),
}
_SIZES: dict[str, tuple[Callable[[str, str], float], str, str]] = {  # by flag: parser, metavar, help
    "--draft-params": (parse_num_params, "N", "parameters of the draft (350M), in place of --t-draft"),
    "--target-params": (parse_num_params, "N", "parameters of the target (7B, 7e9), in place of --t-target"),
    "--edge-bandwidth": (parse_bandwidth, "B", "memory bandwidth of the edge: 60GB/s"),
    "--edge-flops": (parse_flops, "F", "operations a second that the edge computes: 2T"),
    "--cloud-bandwidth": (parse_bandwidth, "B", "memory bandwidth of the target's machine: 900GB/s"),
    "--cloud-flops": (parse_flops, "F", "operations a second that it computes: 300T"),
}
DEFAULT_BYTES_PER_PARAM = (0.5, 2.0)  # an INT4 draft, a bfloat16 target
_CONTEXT = 4096  # tokens of a session
_MEMORY_FLAGS = ("--weights", "--kv", "--gpu-memory", "--target-kv", "--sessions", "--context")
_OF_MEASURING = {  # destinations by flag, beside settings of a run
    "--json-schema": "json_schema_file",
    "--grammar": "grammar_file",
    "--prompt": "prompt",
    "--measure-s": "measure_s",
    "--config": "config",
}
_MEASURE_S = 12.0
_OWNERS = {  # a machine's figures: what is computed with them
    "--edge-bandwidth": ("--draft-params",),
    "--edge-flops": ("--draft-params",),
    "--cloud-bandwidth": ("--target-params", "--draft-params"),
    "--cloud-flops": ("--target-params", "--draft-params"),
    "--bytes-per-param": ("--target-params", "--draft-params"),
}
_EXAMPLES = {"--t-draft": "10ms", "--t-target": "70ms", "--rtt": "50ms", "--alpha": "0.8"}
_MEASURING = frozenset(  # settings of a run that a measurement uses
    (
        "draft",
        "draft_strategy",
        "lookup_ngram",
        "suffix_tokens",
        "suffix_store",
        "datastore",
        "draft_threads",
        "temperature",
        "top_k",
        "top_p",
        "regex",
        "json_whitespace",
        "method",
    )
    + ("draft_backend", "draft_device", "draft_weights", "draft_kv_dtype")
    + ("support_size", "transport", "min_draft_ms", "seed", "log_level")
    + ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "insecure_token")
)
_DESCRIPTION = """Predict what a link and two models give, by the cost model: the best draft length, ms a
token in every mode and with trees, and the round trip below which drafting at the edge pays. Needs no models
and no network:

  edge-client plan --t-draft 10ms --t-target 70ms --rtt 50ms --alpha 0.8
  edge-client plan --draft-params 0.5B --edge-bandwidth 60GB/s --edge-flops 1T --rtt 50ms --alpha 0.8 \\
    --target-params 70B --cloud-bandwidth 3.3TB/s --cloud-flops 900T
  edge-client plan --measure 127.0.0.1:7077

Or what fits on a GPU, alone or with the above:

  edge-client plan --target-params 7B --weights nf4 --kv fp8 --gpu-memory 24GiB --sessions 16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plan`."""
    parser.description, parser.formatter_class = _DESCRIPTION, argparse.RawDescriptionHelpFormatter
    for flag, what in _DURATIONS.values():
        parser.add_argument(flag, metavar="T", help=f"{what} (10ms, 1.5s, 800us)")
    for flag, (_, metavar, what) in _SIZES.items():
        parser.add_argument(flag, metavar=metavar, help=what)
    parser.add_argument(
        "--bytes-per-param",
        metavar="B[,B]",
        help="of both models, or of the draft and the target; default {:g},{:g}, or by --weights".format(
            *DEFAULT_BYTES_PER_PARAM
        ),
    )
    _add_memory_arguments(parser)
    parser.add_argument(
        "--alpha",
        metavar="A[,A...]",
        help="chance that a drafted token is accepted, given that those before it are: 0.8, or by position "
        "0.9,0.8,0.7 (the last repeats)",
    )
    parser.add_argument("--bandwidth-up", metavar="R", help="edge to cloud: 10mbit; default no limit")
    parser.add_argument("--bandwidth-down", metavar="R", help="cloud to edge")
    parser.add_argument(
        "--max-draft-tokens",
        type=int,
        default=MAX_DEPTH,
        metavar="N",
        help=f"longest draft to consider; default {MAX_DEPTH}",
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
    parser.add_argument("--measure-s", type=float, metavar="S", help=f"for so long; default {_MEASURE_S:g}")
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="to measure with; may be repeated"
    )
    add_grammar_files(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of the settings below")
    add_flags(parser, RunConfig, only=_MEASURING)


def _add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", choices=tuple(WEIGHTS), help="how the target keeps its weights; default bfloat16"
    )
    parser.add_argument("--kv", choices=KV, help="KV of the target: auto is as its dtype, fp8 half as much")
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="of the target's GPU, such as 24GiB; default a line for each usual size",
    )
    parser.add_argument(
        "--target-kv",
        metavar="LxHxD",
        help="layers, KV heads and their size of the target: 28x4x128; default as a Llama 3 of its size",
    )
    parser.add_argument("--sessions", type=int, metavar="N", help="that should fit; default as many as do")
    parser.add_argument(
        "--context", type=int, metavar="N", help=f"tokens of a session in memory; default {_CONTEXT}"
    )


def main(namespace: argparse.Namespace) -> int:
    """Prints the plan and returns 0, whether speculation pays or not. Raises `OutriderError`."""
    if not namespace.measure:
        _check_unmeasured(namespace)
    price = namespace.price_per_hour
    if not 1 <= namespace.max_draft_tokens <= MOST_DRAFT_TOKENS:
        raise UsageError(f"--max-draft-tokens {namespace.max_draft_tokens}: want 1 to {MOST_DRAFT_TOKENS}")
    if price is not None and not 0 <= price < math.inf:
        raise UsageError(f"--price-per-hour {price}: want a price of at least 0")
    memory = _memory(namespace)
    if memory is not None and not _asks_for_times(namespace):
        print(
            json.dumps({"schema": 1, "memory": memory_json(memory)})
            if namespace.json
            else memory_text(memory)
        )
        return 0
    given = _given(namespace)
    parts, labels, more = _measure(namespace, given) if namespace.measure else (_complete(given), (), {})
    plan = make_plan(parts, namespace.max_draft_tokens)
    if memory is not None:
        more["memory"] = memory_json(memory)
    if namespace.json:
        print(json.dumps(plan_json(plan, price_per_hour=price, labels=labels, more=more)))
        return 0
    # NO_COLOR is no setting of ours but a convention of terminals (no-color.org).
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(plan_text(plan, price_per_hour=price, labels=labels, is_coloured=is_coloured))
    if memory is not None:
        print(f"\n{memory_text(memory)}")
    return 0


def _check_unmeasured(namespace: argparse.Namespace) -> None:
    """Raises `UsageError` naming the first flag that only a measurement uses."""
    given = [flag for flag, dest in _OF_MEASURING.items() if getattr(namespace, dest) not in (None, [])]
    given += [f"--{key.replace('_', '-')}" for key in given_flags(namespace, RunConfig) if key != "log_level"]
    if given:
        raise UsageError(f"{given[0]} goes with --measure HOST:PORT, which it changes")


def _memory(namespace: argparse.Namespace) -> MemoryPlan | None:
    """Returns the plan of memory, None where no flag asks for one."""
    if not (asked := [flag for flag in _MEMORY_FLAGS if getattr(namespace, _dest(flag)) is not None]):
        return None
    if namespace.target_params is None:
        raise UsageError(f"{asked[0]} needs --target-params too: 7B, for example")
    if (text := namespace.bytes_per_param) is not None:
        beside = f"{asked[0]} {getattr(namespace, _dest(asked[0]))}"
        raise UsageError(f"--bytes-per-param {text} beside {beside}: leave one out; --weights sets both")
    counts = {"--sessions": namespace.sessions, "--context": namespace.context}
    for flag, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: want at least 1")
    kv_heads = None
    if namespace.target_kv is not None and (kv_heads := parse_kv_heads(namespace.target_kv)) is None:
        raise UsageError(
            f"--target-kv {namespace.target_kv}: want layers, KV heads and their size, such as 28x4x128"
        )
    size = namespace.gpu_memory
    num_params = parse_num_params(namespace.target_params, "--target-params")
    return MemoryPlan(
        num_params,
        namespace.weights or "bfloat16",
        namespace.kv or "auto",
        nearest_shape(num_params),
        kv_heads,
        namespace.context or _CONTEXT,
        namespace.sessions or 0,
        USUAL_GPUS if size is None else (parse_size(size, "--gpu-memory"),),
    )


def _asks_for_times(namespace: argparse.Namespace) -> bool:
    """Returns whether any flag but those of memory is of a prediction of times."""
    flags = (
        {flag for flag, _ in _DURATIONS.values()} | set(_SIZES) | {"--alpha", "--measure", "--price-per-hour"}
    )
    return any(getattr(namespace, _dest(flag)) is not None for flag in flags - {"--target-params"})


# ------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True, slots=True)
class _Given:
    draft_token: Known | None = None
    draft_fixed: Known | None = None
    target_token: Known | None = None
    verify_fixed: Known | None = None
    verify_token: Known | None = None
    colocated_draft_token: Known | None = None
    tree_base: Known | None = None
    tree_node: Known | None = None
    rtt: Known | None = None
    rate_up: Known | None = None
    rate_down: Known | None = None
    acceptance: tuple[Known, ...] = ()
    sequences: tuple[AcceptanceSequence, ...] = ()
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)
    sources: tuple[SourceRounds, ...] = ()
    lacks_draft: bool = False
    method: Method | None = None  # measured with


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
    return _with_rooflines(_Given(**found), namespace)


def _with_rooflines(given: _Given, namespace: argparse.Namespace) -> _Given:
    sizes = {
        flag: parse(text, flag)
        for flag, (parse, _, _) in _SIZES.items()
        if (text := getattr(namespace, _dest(flag))) is not None
    }
    for flag, owners in _OWNERS.items():
        if getattr(namespace, _dest(flag)) is not None and not sizes.keys() & set(owners):
            raise UsageError(f"{flag} needs {' or '.join(owners)} too, whose times are computed with it")
    per_param = _bytes_per_param(namespace)
    draft = target = there = None
    if given.draft_token is None:
        draft = _roofline(sizes, "draft", "edge", per_param[0])
    if given.target_token is None:
        target = _roofline(sizes, "target", "cloud", per_param[1])
    if draft is not None and "--cloud-bandwidth" in sizes and "--cloud-flops" in sizes:
        there = _roofline(sizes, "draft", "cloud", per_param[0])
    return replace(
        given,
        draft_token=given.draft_token or _row(draft),
        target_token=given.target_token or _row(target),
        verify_fixed=given.verify_fixed or _row(target),
        verify_token=given.verify_token or (Known(0.0, COMPUTED) if target is not None else None),
        colocated_draft_token=given.colocated_draft_token or _row(there),
        tree_base=given.tree_base or _runs_of_a_tree(draft),
        tree_node=given.tree_node or (Known(draft.row_s, COMPUTED) if draft is not None else None),
        rooflines={name: each for name, each in (("draft", draft), ("target", target)) if each is not None},
    )


def _roofline(
    sizes: Mapping[str, float], model: str, machine: str, bytes_per_param: float
) -> Roofline | None:
    """Returns None where none of its flags is given; raises `UsageError` where only some are."""
    flags = [f"--{model}-params", f"--{machine}-bandwidth", f"--{machine}-flops"]
    missing = [flag for flag in flags if flag not in sizes]
    if flags[0] in missing:
        return None
    if missing:
        raise UsageError(f"{flags[0]} needs {', '.join(missing)} too; or give --t-{model} instead")
    num_params, bandwidth, flops = (sizes[flag] for flag in flags)
    return Roofline(num_params, bytes_per_param, bandwidth, flops)


def _row(roofline: Roofline | None) -> Known | None:
    return None if roofline is None else Known(roofline.forward_s(1), COMPUTED)


def _runs_of_a_tree(draft: Roofline | None) -> Known | None:
    return None if draft is None else Known(SETTINGS.tree_base_tokens * draft.forward_s(1), COMPUTED)


def _bytes_per_param(namespace: argparse.Namespace) -> tuple[float, float]:
    text, memory = namespace.bytes_per_param, _memory(namespace)
    if text is None:
        of_draft, of_target = DEFAULT_BYTES_PER_PARAM
        return of_draft, of_target if memory is None else memory.weight_bytes / memory.num_params
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(0 < value < math.inf for value in values):
        raise UsageError(
            f"--bytes-per-param {text}: want one number above 0, or two: of the draft, of the target"
        )
    return values[0], values[-1]


def _complete(given: _Given) -> PlanParts:
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
            "or --measure HOST:PORT takes it from a verifier and the draft; or --draft-params and "
            "--target-params with the bandwidth and flops of their machines compute --t-draft and --t-target"
        )
    draft, target, rtt = given.draft_token, given.target_token, given.rtt
    assert draft is not None and target is not None and rtt is not None
    others = {each.name: getattr(given, each.name) for each in fields(given)}
    return complete_parts(**others | {"draft_token": draft, "target_token": target, "rtt": rtt})


def _measure(
    namespace: argparse.Namespace, given: _Given
) -> tuple[PlanParts, tuple[str, ...], dict[str, Any]]:
    """Returns all parts, measured where flags give none, the labels of both ends, and a JSON record."""
    from outrider.common.process.logs import setup_logging
    from outrider.edge_client.config.flags import grammar_texts, load_run_config
    from outrider.edge_client.config.methods import check_draft_paths
    from outrider.edge_client.planning.measure import PROMPTS, measure, parts_from, rarely_measured
    from outrider.edge_client.session.factory import create_edge

    seconds = _MEASURE_S if namespace.measure_s is None else namespace.measure_s
    if not 0 < seconds < math.inf:
        raise UsageError(f"--measure-s {seconds}: want seconds above 0")
    loaded = with_values(load_run_config(namespace).value, **grammar_texts(namespace))
    config = replace(loaded, verifier=namespace.measure, mode=ExecutionMode.SPECULATIVE)
    setup_logging(config.logs.level)
    check_draft_paths(config, has_draft=True)
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
        known["sequences"] = ()
    model = samples.model
    labels = (*edge.labels, *(model.labels if model else ()), *rarely_measured(samples, config))
    num_rounds = len(samples.rounds) + len(samples.trees)
    about = {"verifier": namespace.measure, "seconds": seconds, "num_rounds": num_rounds}
    about["target"] = f"{model.model_id} ({model.dtype}, {model.device})" if model else ""
    return _complete(replace(given, **known)), labels, {"measured": about}


def _progress(seconds: float) -> Callable[[float, int], None]:
    last_percent = -1

    def show(share: float, num_rounds: int) -> None:
        nonlocal last_percent
        if (percent := int(100 * share)) != last_percent:
            last_percent = percent
            show_progress(f"measuring for {seconds:g} s: {percent} %, {num_rounds} rounds")

    return show


def _dest(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
