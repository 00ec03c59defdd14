"""The matrix products of a 7B model by their number of rows: times, and whether a row's bits depend on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.gpu_check.plan import NO_SPLIT_K
from benchmarks.gpu_check.shape import SHAPE_7B, SHAPE_TOY
from benchmarks.gpu_check.stage import NONE, Report, Setting
from benchmarks.gpu_check.variants import PRODUCTS, Product

ROWS = (1, 5, 16, 64, 80, 128, 320)
Multiply = Callable[[torch.Tensor], torch.Tensor]


def run(setting: Setting, report: Report) -> None:
    """Measures every matrix in every way; in the process without split products only the plain way."""
    has_splits = any(os.environ.get(name) != value for name, value in NO_SPLIT_K.items())
    ways = PRODUCTS if has_splits else {"no_split_k": PRODUCTS["default"]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for matrix, size in setting.pick(SHAPE_7B, SHAPE_TOY).matrices.items():
        generator = torch.Generator(setting.device).manual_seed(0)
        weight = (
            torch.randn(size, device=setting.device, generator=generator).mul_(size[1] ** -0.5).bfloat16()
        )
        x = torch.randn((max(ROWS), size[1]), device=setting.device, generator=generator).bfloat16()
        for name, way in ways.items():
            for num_rows in ROWS if has_splits else ROWS[:-1]:
                found[name].append({"matrix": matrix} | _measure(setting, weight, x, num_rows, way))
    report.note(**found)
    for name, way in ways.items():
        _judge(report, name, way, found[name])
    if "padded" in found:
        plain_ms, padded_ms = (
            sum(each["ms"] for each in found[name] if each["rows"] == 80) for name in ("default", "padded")
        )
        what = "80 rows padded to 128 : as they are, all five matrices"
        report.figure("gpu.padded_cost", what, padded_ms / plain_ms, "ratio")


def _judge(report: Report, name: str, way: Product, found: list[dict[str, Any]]) -> None:
    changed = [each for each in found if not each["is_equal"]]
    what = f"of {len(found)} (matrix, rows), those where a row's bits are not those of the row alone"
    report.figure(
        f"gpu.product_bits.{name}", what, len(changed), "cases", NONE if way.has_exact_rows else None
    )


def _measure(
    setting: Setting, weight: torch.Tensor, x: torch.Tensor, num_rows: int, way: Product
) -> dict[str, Any]:
    rows = x[:num_rows]
    multiply = make_product(weight, way)
    out, probed = multiply(rows), sorted({0, num_rows // 2, num_rows - 1})
    product_ms = setting.device_ms(lambda: multiply(rows), num_turns=7)
    return {
        "rows": num_rows,
        "ms": product_ms,
        "gbps": weight.numel() * weight.element_size() / 1e6 / product_ms,
        "is_equal": all(torch.equal(multiply(rows[i : i + 1])[0], out[i]) for i in probed),
    }


def make_product(weight: torch.Tensor, way: Product) -> Multiply:
    """Returns x [rows, in] → x Wᵀ [rows, out]."""
    if not way.padded_rows:
        return lambda x: linear(x, weight)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, len(x), way.padded_rows):
            part = x[start : start + way.padded_rows]
            padded = part.new_zeros((way.padded_rows, part.shape[1]))
            padded[: len(part)] = part
            parts.append(linear(padded, weight)[: len(part)])
        return torch.cat(parts)

    return multiply
