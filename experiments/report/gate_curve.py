"""The commit-gate's curve as an SVG of its own: quality against the calls it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.edge_client.calibration.curve import KEEP_ALL, NO_GATE, Curve, CurvePoint
from outrider.experiments.report.drawing import legend_below
from outrider.experiments.report.style import Size, colour, css_variables, series_style
from outrider.experiments.report.svg import draw_svg

_SIZE = Size("wide", 760, 560, 13.0)
_STYLE = (
    "<style>svg.figure { %s background: var(--paper); font-family: system-ui, sans-serif; }"
    "@media (prefers-color-scheme: dark) { svg.figure { %s } }</style>"
)


def draw_curve(curve: Curve) -> str:
    """Returns the SVG. Raises `ModuleNotFoundError` without matplotlib."""
    last = curve.points[-1]
    label = (
        f"Quality against calls saved by the commit-gate, at {len(curve.points)} settings, up to "
        f"{last.calls_saved:.0%} saved"
    )
    svg = draw_svg(lambda figure, size: _draw(curve, figure, size), _SIZE, "gate", label)
    start = svg.index(">") + 1
    return f"{svg[:start]}{_STYLE % (css_variables(False), css_variables(True))}{svg[start:]}\n"


def _draw(curve: Curve, figure: Figure, size: Size) -> None:
    has_loss = all(point.target_nats is not None for point in curve.points)
    above, *rest = figure.subplots(2 if has_loss else 1, 1, sharex=True, squeeze=False)[:, 0]
    _draw_equal(curve.points, above)
    for below in rest:
        _draw_loss(curve, below)
    lowest: Axes = rest[0] if rest else above
    lowest.set_xlabel("calls to the verifier saved, % (against no gate)")
    lowest.set_xlim(-3, 103)
    legend_below(figure, above, size)


def _draw_equal(points: Sequence[CurvePoint], axes: Axes) -> None:
    saved = [100 * point.calls_saved for point in points]
    for index, (name, values) in enumerate(
        (
            ("equal to cloud-only, at the same place", [100 * point.share_equal for point in points]),
            ("before the first difference", [100 * point.share_before for point in points]),
        )
    ):
        axes.plot(saved, values, label=name, **series_style(index).line_arguments())
    _name_points(axes, points, saved, [100 * point.share_equal for point in points])
    axes.set_ylim(0, 106)
    axes.set_ylabel("tokens, %")


def _draw_loss(curve: Curve, axes: Axes) -> None:
    saved = [100 * point.calls_saved for point in curve.points]
    losses = [point.target_nats or 0.0 for point in curve.points]
    errors = [point.target_nats_error or 0.0 for point in curve.points]
    style = series_style(2).line_arguments()
    axes.errorbar(saved, losses, yerr=errors, capsize=3, elinewidth=1.2, **style)
    axes.set_ylabel("target's loss, nats a token\n(dotted: cloud-only's own text)")
    if curve.cloud_only_nats is not None:
        axes.axhline(curve.cloud_only_nats, color=colour("muted"), linestyle=":", linewidth=1.3)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.1 * (high - low), high + 0.1 * (high - low))


def _name_points(
    axes: Axes, points: Sequence[CurvePoint], places: Sequence[float], values: Sequence[float]
) -> None:
    """Names points by percentile, but for those whose names would overlap."""
    last = -100.0
    for point, x, y in zip(points, places, values, strict=True):
        is_end = point.setting in (NO_GATE, KEEP_ALL)
        if not is_end and x - last < 4:
            continue
        last = x
        side: dict[str, Any] = {"xytext": (4, 6)} if x < 85 else {"xytext": (0, 6), "ha": "center"}
        axes.annotate(point.setting, (x, y), textcoords="offset points", **side)
