"""Renders a plan as text and as JSON. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from outrider.common.config.units import show_duration, show_rate
from outrider.common.types import Method
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.planning.plan import (
    ASSUMED,
    COMPUTED,
    MEASURED,
    TREE,
    Known,
    LengthPlan,
    ModePlan,
    Plan,
)
from outrider.edge_client.planning.trees import TreePlan

_GREEN, _YELLOW, _DIM, _RESET = "\x1b[32m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_FIRST_LENGTHS, _LATER_LENGTHS = 8, (12, 16, 24, 32, 48, 64, 96, 128)
_PART_NAMES = {
    "draft_token": "draft, a token",
    "draft_fixed": "  and a round that drafts",
    "target_token": "target, a token alone",
    "verify_fixed": "verification",
    "verify_token": "  and a drafted token",
    "colocated_draft_token": "draft beside the target",
    "tree_base": "draft, a tree",
    "tree_node": "  and a node of it",
    "rtt": "round trip",
    "rate_up": "bandwidth up",
    "rate_down": "bandwidth down",
}
_ASSUMPTIONS = {
    "draft_fixed": "a round's first token takes as long as the others",
    "verify_fixed": "as a step of the target",
    "verify_token": "a forward of several tokens takes as long as one of one",
    "colocated_draft_token": "as fast as at the edge",
    "tree_base": "as long as a few tokens one after the other",
    "tree_node": "a share of a token's time: a run drafts several",
}
_ROOFLINE_PARTS = {
    "draft_token": "one row of the draft at the edge",
    "target_token": "one row of the target",
    "verify_fixed": "one row of the target",
    "verify_token": "as many rows as are memory-bound cost nothing more",
    "colocated_draft_token": "one row of the draft in the cloud",
    "tree_base": "runs of the draft",
    "tree_node": "compute of one row of the draft",
}


def plan_text(
    plan: Plan, *, price_per_hour: float | None, labels: Sequence[str] = (), is_coloured: bool = False
) -> str:
    """Returns the conclusion, the modes, draft lengths and break-evens, and the parts that they come from."""
    verdict = headline(plan)
    if is_coloured:
        verdict[0] = f"{_GREEN if plan.pays else _YELLOW}{verdict[0]}{_RESET}"
    verdict.append(advice(plan))
    tables = [
        _mode_lines(plan, price_per_hour),
        _length_lines(plan),
        _tree_lines(plan),
        _break_even_lines(plan),
    ]
    tables = [lines for lines in tables if lines]
    origin = _part_lines(plan, labels)
    if price_per_hour is not None:
        origin.append("  cost: the target's machine for one session alone on it; several share its forwards")
    if is_coloured:
        origin = [f"{_DIM}{line}{_RESET}" for line in origin]
    return "\n\n".join("\n".join(lines) for lines in (verdict, *tables, origin))


def headline(plan: Plan) -> list[str]:
    """Returns whether to draft at the edge, and whether co-located drafting is faster still, as sentences."""
    cloud, synchronous, pipelined = (
        plan.modes[mode]
        for mode in (ExecutionMode.CLOUD_ONLY, ExecutionMode.SPECULATIVE, ExecutionMode.PIPELINED)
    )
    if not plan.pays:
        best = plan.best_edge
        found = f"cloud-only takes {_ms(cloud)} a token, the best of drafting here {_ms(best)}"
        lines = [f"Speculation does not pay on this link: {found} ({best.mode}, {_length(best)})."]
    elif synchronous.token_s >= cloud.token_s and plan.best_edge.mode == TREE:
        lines = [
            f"Speculation pays only with trees: {_length(plan.best_edge)}, {_ms(plan.best_edge)} a token, "
            f"{plan.speedup(plan.best_edge):.2f} times as fast as cloud-only; chains {_ms(synchronous)}."
        ]
    elif synchronous.token_s >= cloud.token_s:
        lines = [
            f"Speculation pays only pipelined: {_length(pipelined)}, {_ms(pipelined)} a token, "
            f"{plan.speedup(pipelined):.2f} times as fast as cloud-only; synchronous {_ms(synchronous)}."
        ]
    else:
        line = (
            f"Speculation pays: {_length(synchronous)}, {_ms(synchronous)} a token "
            f"({synchronous.tokens_per_s:.1f} tokens/s), {plan.speedup(synchronous):.2f} times as fast as "
            "cloud-only"
        )
        if pipelined.token_s < synchronous.token_s:
            line += f"; pipelined {plan.speedup(pipelined):.2f} times"
        if plan.best_edge.mode == TREE:
            line += f"; trees of {plan.best_edge.num_draft_tokens} tokens {plan.speedup(plan.best_edge):.2f} times"
        lines = [f"{line}."]
    colocated = plan.modes[ExecutionMode.CO_LOCATED]
    if plan.is_colocated_faster and colocated.token_s < cloud.token_s:
        verb = "would be faster still" if plan.pays else "would pay"
        found = f"Co-located speculation {verb}, with a draft in the verifier"
        lines.append(f"{found}: {_ms(colocated)} a token.")
    if (fastest := plan.fastest).draft_source:
        found = f"{fastest.tokens_per_round:.1f} tokens a round, {_ms(fastest)} a token (measured)"
        lines.append(f"Of what this verifier has, {fastest.mode} is the fastest: {found}.")
    return lines


def advice(plan: Plan) -> str:
    """Returns the command that runs the best mode. Co-located drafting is advised where it was measured."""
    if source := plan.fastest.draft_source:
        return f"To run so: edge-client run --mode co-located --draft-source {source}"
    if not plan.pays:
        flags = "--mode cloud-only"
    elif plan.best_edge.mode == TREE:
        flags = f"--tree {plan.best_edge.num_draft_tokens}"
    elif plan.best_edge.mode == ExecutionMode.PIPELINED:
        flags = f"--pipeline on --num-speculative-tokens {plan.best_edge.num_draft_tokens}"
    else:
        flags = f"--num-speculative-tokens {plan.best_edge.num_draft_tokens}"
    if plan.pays and (method := plan.parts.method) is not Method.COUPLED:
        flags += f" --method {method}"
    return f"To run so: edge-client run {flags}; --mode auto decides as it goes."


def plan_json(
    plan: Plan, *, price_per_hour: float | None, labels: Sequence[str], more: dict[str, Any]
) -> dict[str, Any]:
    """Returns the plan with times in ms and rates in bytes a second; null is "no limit", for a break-even "at
    every RTT"."""
    parts: dict[str, Any] = {name: _known_json(name, getattr(plan.parts, name)) for name in _PART_NAMES}
    if plan.parts.sources:
        parts["draft_sources"] = {
            each.name: {"round": _known_json("round", each.round), "tokens_per_round": each.tokens_per_round}
            for each in plan.parts.sources
        }
    modes = {name: _mode_json(plan, each, price_per_hour) for name, each in plan.modes.items()}
    return {
        "schema": 2,
        "pays": plan.pays,
        "best": plan.fastest.mode,
        "headline": " ".join(headline(plan)),
        "parts": {**parts, "acceptance": [_known_json("", each) for each in plan.parts.acceptance]},
        "predicted": {
            "modes": modes,
            "draft_lengths": [_length_json(each) for each in plan.lengths],
            "trees": [_tree_json(each) for each in plan.trees],
            "break_even_rtt_ms": {
                mode: {
                    str(rival): _finite(plan.break_even_rtt_s(mode, rival) * 1e3)
                    for rival in (ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED)
                }
                for mode in _edge_modes(plan)
            },
        },
        "labels": list(labels),
        **({"rooflines": _rooflines_json(plan)} if plan.parts.rooflines else {}),
        **more,
    }


# ------------------------------------------------------------------------------------------- the tables


def _mode_lines(plan: Plan, price_per_hour: float | None) -> list[str]:
    price = "" if price_per_hour is None else f"{'cost/M tokens':>16}"
    width = max(17, *(len(mode) + 1 for mode in plan.modes))
    head = f"{'mode, predicted':<{width}}{'draft':>6}{'ms/token':>10}{'tokens/s':>10}{'vs cloud-only':>16}"
    lines = [head + price]
    for each in plan.modes.values():
        length = "-" if each.num_draft_tokens is None else str(each.num_draft_tokens)
        row = f"{each.mode:<{width}}{length:>6}{each.token_s * 1e3:>10.2f}{each.tokens_per_s:>10.1f}"
        row += f"{plan.speedup(each):>16.2f}"
        row += "" if price_per_hour is None else f"{each.cost_per_million(price_per_hour):>16.2f}"
        lines.append(row + _remark(each))
    return lines


def _remark(mode: ModePlan) -> str:
    if mode.draft_source:
        return f"   {mode.tokens_per_round:.1f} tokens a round, measured"
    match mode.mode:
        case ExecutionMode.PIPELINED:
            return f"   {mode.num_in_flight} rounds in flight"
        case "tree":
            return "   nodes; one round at a time"
        case ExecutionMode.EDGE_ONLY:
            return "   the draft's text, not the target's"
    return ""


def _length_lines(plan: Plan) -> list[str]:
    best = plan.modes[ExecutionMode.SPECULATIVE].num_draft_tokens
    head = (
        f"{'draft, predicted':<17}{'tokens/round':>14}{'ms/round':>10}{'ms/token':>10}{'vs cloud-only':>16}"
    )
    lines = [head + f"{'pays below RTT':>17}"]
    cloud_s = plan.modes[ExecutionMode.CLOUD_ONLY].token_s
    for each in plan.lengths:
        n = each.num_draft_tokens
        if n > _FIRST_LENGTHS and n not in _LATER_LENGTHS and n != best:
            continue
        row = f"{n:<3}{'* best' if n == best else '':<14}{each.tokens_per_round:>14.2f}"
        row += f"{each.round_s * 1e3:>10.1f}{each.token_s * 1e3:>10.2f}{cloud_s / each.token_s:>16.2f}"
        lines.append(row + f"{_rtt(each.break_even_rtt_s):>17}")
    return lines


def _tree_lines(plan: Plan) -> list[str]:
    """Returns a line for each size of trees; none where none is considered."""
    if not plan.trees:
        return []
    best, cloud_s = plan.modes[TREE].num_draft_tokens, plan.modes[ExecutionMode.CLOUD_ONLY].token_s
    chain_s = plan.modes[ExecutionMode.SPECULATIVE].token_s
    head = f"{'tree, predicted':<17}{'tokens/round':>14}{'ms/round':>10}{'ms/token':>10}{'vs cloud-only':>16}"
    lines = [head + f"{'vs best chain':>17}"]
    for each in plan.trees:
        row = f"{each.num_nodes:<3}{'* best' if each.num_nodes == best else '':<14}{each.tokens_per_round:>14.2f}"
        row += f"{each.round_s * 1e3:>10.1f}{each.token_s * 1e3:>10.2f}{cloud_s / each.token_s:>16.2f}"
        lines.append(row + f"{chain_s / each.token_s:>17.2f}")
    return lines


def _edge_modes(plan: Plan) -> list[str]:
    """Returns the modes that draft at the edge and are verified."""
    modes = (ExecutionMode.SPECULATIVE, TREE, ExecutionMode.PIPELINED)
    return [str(mode) for mode in modes if mode in plan.modes]


def _break_even_lines(plan: Plan) -> list[str]:
    lines = ["break-even round trip, predicted, each at its best draft length"]
    for rival in (ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED):
        found = (f"{mode} {_below(plan.break_even_rtt_s(mode, rival))}" for mode in _edge_modes(plan))
        lines.append(f"  against {rival:<12}" + " · ".join(found))
    return lines


def _part_lines(plan: Plan, labels: Sequence[str]) -> list[str]:
    lines = ["from"]
    for name, title in _PART_NAMES.items():
        known: Known = getattr(plan.parts, name)
        show = show_rate if name.startswith("rate") else show_duration
        lines.append(f"  {title:<32}{show(known.value):<14}{_origin(name, known)}")
    for each in plan.parts.sources:
        title = f"co-located, {each.name}, a round"
        lines.append(f"  {title:<32}{show_duration(each.round.value):<14}{_origin('round', each.round)}")
    lines += _acceptance_lines(plan)
    lines += [f"  {name} computed: {roofline}" for name, roofline in plan.parts.rooflines.items()]
    lines += [f"  {label}" for label in labels]
    return lines


def _acceptance_lines(plan: Plan) -> list[str]:
    known = plan.parts.acceptance
    title = "acceptance, first token" if len(known) > 1 else "acceptance"
    lines = [f"  {title:<32}{known[0].value:<14.3g}{_origin('', known[0])}"]
    if len(known) > 1:
        shown = [f"{each.value:.2f}" for each in known[1 : _FIRST_LENGTHS + 1]]
        shown += ["…"] if len(known) > _FIRST_LENGTHS + 1 else []
        lines.append(f"  {'  tokens after it':<32}{' '.join(shown)}")
    if plan.parts.sequences:
        lines.append(f"  {'':<32}in long drafts; each length has the one its rounds would have had")
    return lines


def _origin(name: str, known: Known) -> str:
    if known.source == ASSUMED:
        return f"{ASSUMED}: {_ASSUMPTIONS[name]}" if name in _ASSUMPTIONS else ASSUMED
    if known.source == COMPUTED:
        return f"{COMPUTED}: {_ROOFLINE_PARTS[name]}"
    if known.low is None or known.high is None:
        return known.source
    if name:
        spread = f"80 % between {show_duration(known.low)} and {show_duration(known.high)}"
    else:
        spread = f"95 % interval {known.low:.3g} to {known.high:.3g}"
    return f"{known.source}: {known.num_samples} samples, {spread}"


# ----------------------------------------------------------------------------------------------- values


def _length(mode: ModePlan) -> str:
    if mode.mode == TREE:
        return f"{mode.num_draft_tokens} drafted tokens a round, as a tree"
    return f"{mode.num_draft_tokens} drafted token{'' if mode.num_draft_tokens == 1 else 's'} a round"


def _ms(mode: ModePlan) -> str:
    return show_duration(mode.token_s)


def _rtt(seconds: float) -> str:
    if seconds < 5e-5:  # what is shown as 0 is none
        return "never"
    return "always" if math.isinf(seconds) else f"{seconds * 1e3:.1f} ms"


def _below(seconds: float) -> str:
    return f"below {_rtt(seconds)}".replace("below never", "never").replace("below always", "always")


def _known_json(name: str, known: Known) -> dict[str, Any]:
    scale = 1.0 if not name or name.startswith("rate") else 1e3
    record: dict[str, Any] = {"value": _finite(known.value * scale), "source": known.source}
    if known.low is not None and known.high is not None:
        record |= {"low": known.low * scale, "high": known.high * scale, "n": known.num_samples}
    return record


def _rooflines_json(plan: Plan) -> dict[str, Any]:
    return {
        name: {**dataclasses.asdict(roofline), "compute_bound_rows": roofline.compute_bound_rows}
        for name, roofline in plan.parts.rooflines.items()
    }


def _mode_json(plan: Plan, mode: ModePlan, price_per_hour: float | None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "num_draft_tokens": mode.num_draft_tokens,
        "tpot_ms": mode.token_s * 1e3,
        "tokens_per_s": _finite(mode.tokens_per_s),
        "speedup_over_cloud_only": _finite(plan.speedup(mode)),
        "target_ms_per_token": mode.target_s * 1e3,
    }
    if mode.num_in_flight:
        record["num_rounds_in_flight"] = mode.num_in_flight
    if mode.draft_source:
        record |= {"tokens_per_round": mode.tokens_per_round, "source": MEASURED}
    if price_per_hour is not None:
        record["cost_per_million_tokens"] = mode.cost_per_million(price_per_hour)
    return record


def _length_json(length: LengthPlan) -> dict[str, Any]:
    return {
        "num_draft_tokens": length.num_draft_tokens,
        "tokens_per_round": length.tokens_per_round,
        "round_ms": length.round_s * 1e3,
        "tpot_ms": length.token_s * 1e3,
        "break_even_rtt_ms": length.break_even_rtt_s * 1e3,
    }


def _tree_json(tree: TreePlan) -> dict[str, Any]:
    return {
        "num_nodes": tree.num_nodes,
        "tokens_per_round": tree.tokens_per_round,
        "round_ms": tree.round_s * 1e3,
        "tpot_ms": tree.token_s * 1e3,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
