"""The matrix products of a 7B model by their number of rows: times, whether a row's bits depend on it, and what the
verifier's check at the start would take."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.gpu_check.plan import NO_SPLIT_K
from benchmarks.gpu_check.shape import SHAPE_7B, SHAPE_TOY
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import PRODUCTS, Product
from outrider.cloud_verifier.backends.products.row_plan import (
    ON_GPU,
    MatrixKind,
    RowPlan,
    find_row_plan,
    products_ms,
)
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.common.errors import ModelError
from outrider.experiments.shared.results import at_least, at_most

ROWS, TOY_ROWS = (1, 5, 16, 64, 80, 128, 320), (1, 5, 80, 130)
MAX_COST_ROWS, MAX_COST = 128, 1.25  # exact rows : default, up to so many rows
Multiply = Callable[[torch.Tensor], torch.Tensor]
Matrices = dict[str, torch.Tensor]  # [out, in]
Times = dict[int, float]  # ms of all matrices, by rows


def run(setting: Setting, report: Report) -> None:
    """Measures every matrix in every way; in the process without split products only the plain way."""
    has_splits = any(os.environ.get(name) != value for name, value in NO_SPLIT_K.items())
    ways = PRODUCTS if has_splits else {"no_split_k": PRODUCTS["default"]}
    sizes = setting.pick(SHAPE_7B, SHAPE_TOY).matrices
    matrices = {name: _random(setting, size).mul_(size[1] ** -0.5).bfloat16() for name, size in sizes.items()}
    times: dict[str, Times] = {}
    plans: dict[str, RowPlan] = {}
    for name, way in ways.items():
        try:
            with _multiplying(way) as multiply:
                times[name] = _measure_way(setting, report, name, way, matrices, multiply)
                if way.is_tried and (plan := _find_plan(setting, report, name, way, matrices, multiply)):
                    plans[name] = plan
        except ModelError as reason:
            report.skip(name, str(reason))
    report.note(row_plans={name: plan.counts for name, plan in plans.items()})
    if has_splits:
        costs = {
            name: PRODUCTS[name].make_way().relative_cost * ON_GPU.cost(plan) for name, plan in plans.items()
        }
        what = f"ways to multiply that the verifier's check would find exact: {', '.join(costs)}"
        report.check("gpu.exact_ways", what, len(costs), "", at_least(1))
        if costs:
            taken = min(costs, key=lambda name: costs[name])
            with _multiplying(PRODUCTS[taken]) as multiply:
                _report_cost(setting, report, taken, matrices, multiply, plans[taken], times["default"])
        padded_ms, plain_ms = (times[name][80] for name in ("padded", "default"))
        what = "80 rows padded to 128 : as they are, all five matrices"
        report.figure("gpu.padded_cost", what, padded_ms / plain_ms, "ratio")


@contextlib.contextmanager
def _multiplying(way: Product) -> Iterator[Linear]:
    """Yields the product of a way, which is left afterwards. Raises `ModelError` where it is not offered here."""
    entered = way.make_way()
    multiply = entered.enter(torch.bfloat16)
    try:
        yield multiply
    finally:
        entered.leave()


def _random(setting: Setting, size: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator(setting.device).manual_seed(0)
    return torch.randn(size, device=setting.device, generator=generator)


def _measure_way(
    setting: Setting, report: Report, name: str, way: Product, matrices: Matrices, multiply: Linear
) -> Times:
    found: list[dict[str, Any]] = []
    for matrix, weight in matrices.items():
        rows = setting.pick(ROWS, TOY_ROWS)
        x = _random(setting, (max(rows), weight.shape[1])).bfloat16()
        found += [
            {"matrix": matrix} | _measure(setting, weight, x[:num_rows], way, multiply) for num_rows in rows
        ]
    report.note(**{name: found})
    changed = [each for each in found if not each["is_equal"]]
    what = f"of {len(found)} (matrix, rows), those where a row's bits are not those of the row alone"
    report.figure(
        f"gpu.product_bits.{name}", what, len(changed), "cases", NONE if way.has_exact_rows else None
    )
    return {
        each["rows"]: sum(other["ms"] for other in found if other["rows"] == each["rows"]) for each in found
    }


def _measure(
    setting: Setting, weight: torch.Tensor, rows: torch.Tensor, way: Product, multiply: Linear
) -> dict[str, Any]:
    product, num_rows = make_product(weight, way, multiply), len(rows)
    out, probed = product(rows), sorted({0, num_rows // 2, num_rows - 1})
    product_ms = setting.device_ms(lambda: product(rows), num_turns=7)
    return {
        "rows": num_rows,
        "ms": product_ms,
        "gbps": weight.numel() * weight.element_size() / 1e6 / product_ms,
        "is_equal": all(torch.equal(product(rows[i : i + 1])[0], out[i]) for i in probed),
    }


def make_product(weight: torch.Tensor, way: Product, multiply: Linear = linear) -> Multiply:
    """Returns x [rows, in] → x Wᵀ [rows, out]."""
    if not way.padded_rows:
        return lambda x: multiply(x, weight, None)

    def padded_product(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, len(x), way.padded_rows):
            part = x[start : start + way.padded_rows]
            padded = part.new_zeros((way.padded_rows, part.shape[1]))
            padded[: len(part)] = part
            parts.append(multiply(padded, weight, None)[: len(part)])
        return torch.cat(parts)

    return padded_product


def _find_plan(
    setting: Setting, report: Report, name: str, way: Product, matrices: Matrices, multiply: Linear
) -> RowPlan | None:
    """Returns what the verifier's check at the start would find of these matrices."""
    kinds = [
        MatrixKind(weight.shape[1], weight.shape[0], partial(make_product, way=way, multiply=multiply))
        for weight in matrices.values()
    ]
    choices = setting.pick(ON_GPU, replace(ON_GPU, counts=(8, 16)))
    device = torch.device(setting.device)
    plan = find_row_plan(kinds, torch.bfloat16, device, choices)
    if plan and not setting.is_rehearsal:
        plan = plan.without_slow(products_ms(kinds, plan.counts, torch.bfloat16, device))
    what = f"most rows at once in the check's plan, of {plan.counts if plan else 'none'}; 0: rows differ"
    report.figure(f"gpu.row_plan.{name}", what, plan.most if plan else 0, "rows")
    return plan


def _report_cost(
    setting: Setting,
    report: Report,
    name: str,
    matrices: Matrices,
    multiply: Linear,
    plan: RowPlan,
    plain: Times,
) -> None:
    """Reports the products' time with the plan that is taken : as they are, for the worst number of rows."""
    costs = {}
    for num_rows, plain_ms in plain.items():
        exact_ms, counts = 0.0, [plan.most] * (num_rows // plan.most)
        if rest := num_rows % plan.most:
            counts.append(plan.fit(rest))
        for weight, count in itertools.product(matrices.values(), counts):
            x = _random(setting, (count, weight.shape[1])).bfloat16()
            exact_ms += setting.device_ms(partial(multiply, x, weight, None), num_turns=7)
        costs[num_rows] = exact_ms / plain_ms
    worst = max(costs, key=lambda num_rows: costs[num_rows] if num_rows <= MAX_COST_ROWS else 0.0)
    report.note(exact_costs=costs)
    what = f"products of the check's plan ({name}) : default, worst of up to {MAX_COST_ROWS} rows ({worst})"
    report.figure("gpu.exact_cost.products", what, costs[worst], "ratio", at_most(MAX_COST))
