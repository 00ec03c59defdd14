"""Measures the commit-gate: how many calls to the verifier it saves at each threshold, and how the text
differs.

The functions that write texts and measure losses are parameters, so that this needs no model.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from outrider.common.sequences import common_prefix
from outrider.common.types import TokenIds

NO_GATE = "no gate"
KEEP_ALL = "keep all"


@dataclass(frozen=True, slots=True)
class Written:
    """Holds one text. `num_calls` counts rounds with the verifier, without the opening that every text has;
    `num_kept` counts tokens that the gate kept."""

    token_ids: TokenIds
    num_calls: int
    num_kept: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Holds one setting's figures over all texts.

    `calls_saved` is the share of the calls per token that no gate takes. `share_equal` counts tokens equal to
    cloud-only's at the same position, `share_before` those before the first difference. The target's loss is
    in nats a token, None where it was not measured; its `error` is half the 95 % interval of the difference
    from cloud-only, paired by text.
    """

    setting: str  # a percentile ("80"), NO_GATE or KEEP_ALL
    num_tokens: int
    num_calls: int
    calls_per_token: float
    calls_saved: float
    kept_share: float
    share_equal: float
    share_before: float
    target_nats: float | None = None
    target_nats_error: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Holds the points: no gate, rising percentiles, all kept. `cloud_only_nats` is the target's loss of its
    own text in nats a token, None where it was not measured."""

    points: tuple[CurvePoint, ...]
    cloud_only_nats: float | None


Write = Callable[[int], Written]  # the text after the passage with this number
Nats = Callable[[int, TokenIds], float | None]  # passage, tokens: the target's loss, summed


def measure_curve(references: Sequence[TokenIds], writers: Sequence[tuple[str, Write]], nats: Nats) -> Curve:
    """Returns the curve with a point for each of `writers`, named by its setting; the first writes without a
    gate. `references` are cloud-only's texts."""
    return Curve(tuple(_points(references, writers, nats)), _mean_nats(references, nats))


def _points(
    references: Sequence[TokenIds], writers: Sequence[tuple[str, Write]], nats: Nats
) -> Iterator[CurvePoint]:
    assert writers and writers[0][0] == NO_GATE, "the curve is against no gate"
    calls_without: float | None = None
    for setting, write in writers:
        texts = [write(index) for index in range(len(references))]
        if calls_without is None:
            calls_without = _calls_per_token(texts)
        yield _make_point(setting, references, texts, calls_without, nats)


def _make_point(
    setting: str,
    references: Sequence[TokenIds],
    texts: Sequence[Written],
    calls_without: float,
    nats: Nats,
) -> CurvePoint:
    num_tokens = sum(len(text.token_ids) for text in texts)
    calls_per_token = _calls_per_token(texts)
    pairs = [(text.token_ids, reference) for text, reference in zip(texts, references, strict=True)]
    num_longest = sum(max(len(ours), len(theirs)) for ours, theirs in pairs)
    num_equal = sum(a == b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False))
    return CurvePoint(
        setting=setting,
        num_tokens=num_tokens,
        num_calls=sum(text.num_calls for text in texts),
        calls_per_token=calls_per_token,
        calls_saved=1 - calls_per_token / calls_without if calls_without else 0.0,
        kept_share=_ratio(sum(text.num_kept for text in texts), num_tokens),
        share_equal=_ratio(num_equal, num_longest),
        share_before=_ratio(sum(common_prefix(ours, theirs) for ours, theirs in pairs), num_longest),
        target_nats=_mean_nats([ours for ours, _ in pairs], nats),
        target_nats_error=_error(pairs, nats),
    )


def _calls_per_token(texts: Sequence[Written]) -> float:
    return _ratio(sum(text.num_calls for text in texts), sum(len(text.token_ids) for text in texts))


def _mean_nats(texts: Sequence[TokenIds], nats: Nats) -> float | None:
    losses = _losses(texts, nats)
    num_tokens = sum(map(len, texts))
    return sum(losses) / num_tokens if losses and num_tokens else None


def _error(pairs: Sequence[tuple[TokenIds, TokenIds]], nats: Nats) -> float | None:
    """Returns half the 95 % interval of the loss's difference; None for fewer than two texts."""
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    losses, references = _losses(ours, nats), _losses(theirs, nats)
    if len(pairs) < 2 or not (losses and references and all(ours) and all(theirs)):
        return None
    own = [loss / len(token_ids) for loss, token_ids in zip(losses, ours, strict=True)]
    cloud = [loss / len(token_ids) for loss, token_ids in zip(references, theirs, strict=True)]
    differences = [a - b for a, b in zip(own, cloud, strict=True)]
    return 1.96 * statistics.stdev(differences) / math.sqrt(len(differences))


def _losses(texts: Sequence[TokenIds], nats: Nats) -> list[float]:
    losses = [nats(index, token_ids) for index, token_ids in enumerate(texts)]
    known = [loss for loss in losses if loss is not None]
    return known if len(known) == len(losses) else []


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
