"""Prints a curve for a terminal and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields

from outrider.edge_client.calibration.curve import CurvePoint

_COLUMNS = ("calls saved", "calls/token", "kept unasked", "equal", "before difference", "    target loss")


def curve_table(points: Sequence[CurvePoint], cloud_only_nats: float | None) -> str:
    """Returns the curve with a line for each point, and cloud-only's own loss below."""
    lines = [_line("percentile", _COLUMNS)]
    for point in points:
        shares = [f"{each:.1%}" for each in (point.kept_share, point.share_equal, point.share_before)]
        calls = (f"{point.calls_saved:.1%}", f"{point.calls_per_token:.3f}")
        loss = _loss(point.target_nats, point.target_nats_error)
        lines.append(_line(point.setting, (*calls, *shares, loss)))
    lines.append(_line("cloud-only", ("", "", "", "", "", _loss(cloud_only_nats))))
    return "\n".join(lines)


def curve_csv(points: Sequence[CurvePoint]) -> str:
    """Returns the points as CSV, with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(CurvePoint)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return out.getvalue()


def _line(first: str, cells: Sequence[str]) -> str:
    widths = [len(column) + 2 for column in _COLUMNS]
    return f"{first:<10}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _loss(nats: float | None, error: float | None = None) -> str:
    if nats is None:
        return "-"
    return f"{nats:.3f} ±{error:.3f}" if error is not None else f"{nats:.3f}       "
