"""The tables below the figures: every cell with its intervals, and the manifest. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.report.figures.base import Table
from outrider.experiments.report.naming import Arm, link_label, outages_of
from outrider.experiments.report.numbers import ABSENT, counted, listed, plain, times, with_interval
from outrider.experiments.report.view import View
from outrider.experiments.sweep.results.metrics import describe
from outrider.experiments.sweep.results.records import CellRow

_FIRST = ("tpot_ms", "ttft_ms", "otps")  # the columns a reader looks for first


def cells_table(view: View) -> Table:
    """Returns a row a cell, the A/A twins too; a column for each metric that any cell has."""
    cells = view.sweep.cells
    units = {name: metric.unit for cell in cells for name, metric in cell.metrics.items()}
    names = [name for name in _FIRST if name in units] + [name for name in units if name not in _FIRST]
    set_columns = {name: [_setting(cell, name) for cell in cells] for name in _SETTINGS}
    told = [name for name, values in set_columns.items() if len(set(values)) > 1 or name in _ALWAYS]
    measured = (*(_head(name, units[name]) for name in names), "same text", "n", "errors", "A/A")
    heads = ("link", "arm", *measured, *told)
    rows = []
    for index, cell in enumerate(cells):
        values = [with_interval(cell.metrics.get(name)) for name in names]
        set_values = [set_columns[name][index] for name in told]
        counts = (str(cell.num_requests), str(cell.num_errors), _a_a(cell))
        arm = view.label(Arm.of(cell)) + (", again" if cell.twin else "")
        rows.append((link_label(cell.link), arm, *values, _texts(cell), *counts, *set_values))
    return Table(heads, tuple(rows))


_ALWAYS = ("TLS",)  # told even where it is the same for all
_SETTINGS = (
    "RTT, ms",
    "mode",
    "policy",
    "n drafted",
    "trees",
    "method",
    "constraint",
    "variant",
    "realisation",
    "TLS",
    "temperature",
    "sessions",
    "min forward, ms",
    "min draft, ms",
    "synthetic",
    "repeats cell",
)


def _setting(cell: CellRow, name: str) -> str:
    values: dict[str, Any] = {
        "RTT, ms": plain(cell.rtt_ms),
        "mode": cell.mode,
        "policy": cell.depth_policy,
        "n drafted": ABSENT if cell.num_speculative_tokens is None else cell.num_speculative_tokens,
        "trees": cell.tree,
        "method": cell.method,
        "constraint": cell.constraint,
        "variant": cell.variant,
        "realisation": cell.realisation,
        "TLS": "yes" if cell.tls else "no",
        "temperature": plain(cell.temperature),
        "sessions": cell.num_sessions,
        "min forward, ms": plain(cell.min_forward_ms),
        "min draft, ms": plain(cell.min_draft_ms),
        "synthetic": "yes" if cell.is_synthetic else "no",
        "repeats cell": cell.twin,
    }
    return str(values[name])


def meanings(view: View) -> list[tuple[str, str]]:
    """Returns the metrics' columns in a sentence each."""
    units = {name: metric.unit for cell in view.sweep.cells for name, metric in cell.metrics.items()}
    found = []
    for name, unit in units.items():
        try:
            found.append((_head(name, unit), describe(name)))
        except StopIteration:  # a metric of a later program
            continue
    return found


def _head(name: str, unit: str) -> str:
    words = name
    for ending in ("_ms", "_share", "_per_s"):
        words = words.removesuffix(ending) if unit in ("ms", "share", "tokens/s") else words
    return f"{words.replace('_', ' ')}, {unit}" if unit else words


def _texts(cell: CellRow) -> str:
    """Returns requests with cloud-only's very tokens of those compared; the share of equal tokens where
    not all."""
    texts = cell.texts
    if not texts.num_compared:
        return ABSENT
    told = f"{texts.num_equal}/{texts.num_compared}"
    if texts.share_equal is not None and texts.num_equal < texts.num_compared:
        told += f" ({100 * texts.share_equal:.0f} % of tokens)"
    return told + (f", {counted(texts.num_ties, 'tie')}" if texts.num_ties else "")


def _a_a(cell: CellRow) -> str:
    measure = cell.a_a.get("tpot_ms")
    return times(measure.get("speedup")) if isinstance(measure, dict) else ABSENT


def manifest_rows(view: View) -> list[tuple[str, str]]:
    """Returns what is needed to run the sweep again and to believe it, in words."""
    manifest = view.results.manifest
    rows: list[tuple[str, str]] = [
        ("sweep", manifest.name),
        ("commit", manifest.commit + (" with uncommitted changes" if manifest.is_dirty else "")),
        ("started", manifest.started),
        ("finished", manifest.finished or "not finished"),
    ]
    rows += [(f"model: {name}", _text(value)) for name, value in manifest.models.items()]
    targets = dict.fromkeys(row.target for row in view.results.requests if row.target)
    rows += [("target", name) for name in targets if name not in manifest.models.values()]
    rows += [(name.replace("_", " "), _text(value)) for name, value in manifest.machine.items()]
    rows += [("seeds", _pairs(manifest.seeds)), ("versions", _pairs(manifest.versions))]
    return rows


def facts_table(view: View) -> Table | None:
    """Returns what the link realisations report of themselves: links that report the same share a row."""
    same: dict[str, list[str]] = {}
    for name, facts in view.results.manifest.realisation.items():
        same.setdefault(json.dumps(facts, sort_keys=True), []).append(name)
    records = [{"links": listed(names)} | _mapping(json.loads(facts)) for facts, names in same.items()]
    return _records_table(records)


def calibration_table(view: View) -> Table | None:
    """Returns the calibration as its run wrote it; its keys are the columns, its points the rows."""
    records: list[dict[str, Any]] = []
    for record in view.results.manifest.calibration:
        points = record.get("points")
        records += points if isinstance(points, list) else [record]
    return _records_table(records)


def links_table(view: View) -> Table:
    """Returns every link of the sweep: the fields in which any of them is not an ideal one."""
    links = {json.dumps(cell.link, sort_keys=True): cell.link for cell in view.sweep.cells if cell.link}
    ideal = dataclasses.asdict(LinkProfile())
    told = dict.fromkeys(["name", "rtt_ms"])
    for link in links.values():
        told |= dict.fromkeys(
            name for name, value in link.items() if (value or None) != (ideal.get(name) or None)
        )
    rows = tuple(tuple(_link_text(link, name) for name in told) for link in links.values())
    return Table(tuple(name.replace("_", " ") for name in told), rows)


def _link_text(link: Mapping[str, Any], name: str) -> str:
    if name == "outages":
        return ", ".join(f"{plain(low)} to {plain(high)} s" for low, high in outages_of(link)) or ABSENT
    return _text(link.get(name))


def _records_table(records: Sequence[Mapping[str, Any]]) -> Table | None:
    if not records:
        return None
    columns = tuple(dict.fromkeys(key for record in records for key in record))
    rows = tuple(tuple(_text(record.get(name)) for name in columns) for record in records)
    return Table(tuple(name.replace("_", " ") for name in columns), rows)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {"facts": value}


def _pairs(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in record.items()) or ABSENT


def config_text(view: View) -> str:
    """Returns the resolved sweep as JSON."""
    import yaml

    return yaml.safe_dump(view.results.manifest.config, sort_keys=False, allow_unicode=True, width=100)


def _text(value: Any) -> str:
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return plain(value)
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or ABSENT
    if isinstance(value, dict):
        return _pairs(value)
    return json.dumps(value, ensure_ascii=False)
