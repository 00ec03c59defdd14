"""Lists what a reader must know before believing a figure of the folder. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outrider.experiments.report.naming import CLOUD_ONLY, EDGE_ONLY, TPOT, Arm, link_label
from outrider.experiments.report.numbers import counted, interval, listed, spread, times, with_interval
from outrider.experiments.report.verdicts import aa_factor
from outrider.experiments.report.view import View
from outrider.experiments.sweep.config.schema import DIRECT, SIMULATED
from outrider.experiments.sweep.results.records import CellRow

FEWEST_REPEATS = 3
FEWEST_REQUESTS = 30
BUSY_SHARE = 0.25  # of the cores: other work then moves times by more than an A/A pair shows
LOSS = "target_nats_per_token"


def cautions(view: View) -> list[str]:
    """Returns the warnings in the order of their weight; empty where there is nothing to warn of."""
    return [line for check in _CHECKS for line in check(view)]


def _unfinished(view: View) -> Iterator[str]:
    if not view.sweep.is_complete:
        yield "The sweep was interrupted: some cells have fewer requests than were asked for."


def _different_texts(view: View) -> Iterator[str]:
    wrong = [cell for cell in view.sweep.cells if cell.texts.is_exact_text and cell.texts.num_different]
    if wrong:
        num = sum(cell.texts.num_different for cell in wrong)
        names = _ids(wrong)
        yield (
            f"{counted(num, 'text')} of cells that promise cloud-only's text differ from it ({names}): "
            "their figures are of another text, and this is a bug."
        )
    unjudged = sum(cell.texts.num_unjudged for cell in view.sweep.cells if cell.texts.is_exact_text)
    if unjudged:
        yield f"{counted(unjudged, 'text')} differ from cloud-only's; no target was at hand to say why."


def _synthetic(view: View) -> Iterator[str]:
    made = [cell for cell in view.sweep.cells if cell.is_synthetic]
    if made:
        share = "Every cell is" if len(made) == len(view.sweep.cells) else f"{len(made)} of the cells are"
        yield f"{share} synthetic: acceptance and model times were given, no weights were run."


def _simulated(view: View) -> Iterator[str]:
    if any(cell.realisation == SIMULATED for cell in view.sweep.cells):
        yield "Played in virtual time: every figure is the simulator's prediction, nothing was measured here."


def _labels(view: View) -> Iterator[str]:
    labels = dict.fromkeys(label for cell in view.sweep.cells for label in cell.labels)
    if labels:
        yield f"Labels that results carry: {listed(list(labels), 12)}."


def _dirty(view: View) -> Iterator[str]:
    if view.results.manifest.is_dirty:
        commit = view.results.manifest.commit
        yield f"The tree had uncommitted changes: commit {commit} does not give this code."


def _baselines(view: View) -> Iterator[str]:
    if view.sweep.missing_baselines:
        yield f"Left out by the sweep's own wish: {listed(view.sweep.missing_baselines)}."


def _errors(view: View) -> Iterator[str]:
    failed = [cell for cell in view.sweep.cells if cell.num_errors]
    if failed:
        num = sum(cell.num_errors for cell in failed)
        names = _ids(failed)
        yield f"{counted(num, 'request')} ended with an error and are in no figure ({names})."
    empty = [cell for cell in view.sweep.cells if TPOT not in cell.metrics]
    if empty:
        names = _ids(empty)
        yield f"{counted(len(empty), 'cell')} without a figure, refused by the link or failed: {names}."


def _inexact(view: View) -> Iterator[str]:
    """Says what arms lose that are not the target's own, a line each; the draft alone is another text
    anyway."""
    by_arm: dict[Arm, list[CellRow]] = {}
    for cell in view.cells:
        if cell.mode != EDGE_ONLY and not view.is_exact(cell):
            by_arm.setdefault(Arm.of(cell), []).append(cell)
    for arm, cells in by_arm.items():
        links = listed(list(dict.fromkeys(link_label(cell.link) for cell in cells)))
        yield f"{view.label(arm)} is not exact on {links}: {'; '.join(_losses(view, cells))}."


def _losses(view: View, cells: Sequence[CellRow]) -> Iterator[str]:
    for name, what in (
        ("unverified_share", "of its tokens the target never confirmed"),
        ("approximate_share", "let in by an approximate method"),
    ):
        shares = [100 * cell.metrics[name].value for cell in cells if name in cell.metrics]
        if any(shares):
            yield f"{spread(shares, '%')} {what}"
    # A simulated target knows one text alone.
    equal = [cell.texts.share_equal for cell in cells if cell.realisation != SIMULATED]
    if known := [100 * share for share in equal if share is not None]:
        yield f"{spread(known, '%')} are cloud-only's at the same place"
    if told := _nats(cells):
        temperatures = {cell.temperature for cell in cells}
        theirs = _nats([c for c in view.cells if c.mode == CLOUD_ONLY and c.temperature in temperatures])
        beside = f", cloud-only's {theirs}" if theirs else ""
        yield f"the target's loss of the text is {told} nats a token{beside}"


def _nats(cells: Sequence[CellRow]) -> str:
    found = [cell.metrics[LOSS] for cell in cells if LOSS in cell.metrics]
    if not found:
        return ""
    return with_interval(found[0]) if len(found) == 1 else spread([each.value for each in found])


def _spread_of_equals(view: View) -> Iterator[str]:
    twins = [cell for cell in view.sweep.cells if cell.twin]
    measures = [cell.a_a[TPOT] for cell in twins if isinstance(cell.a_a.get(TPOT), dict)]
    if not measures:
        yield "No A/A cells: how far apart equal cells are was not measured."
        return
    ids = {cell.id for cell in twins}
    compared = [each for each in view.sweep.comparisons if each.metric == TPOT and each.cell not in ids]
    factor = max(aa_factor(view), *(_widest(measure) for measure in measures))
    close = [each for each in compared if 1 / factor < each.ratio < factor]
    if close:
        told = [f"{times(m['speedup'])} {interval(m.get('low'), m.get('high'))}".strip() for m in measures]
        yield (
            f"A/A: an equal cell's TPOT compares as {listed(told)}. Of {len(compared)} comparisons with a "
            f"baseline {len(close)} are no further from 1 than that: noise alone can make them."
        )


def _widest(measure: Mapping[str, Any]) -> float:
    """Returns the end of the interval that is further from 1, as a factor above it."""
    ends = [float(end) for end in (measure.get("low"), measure.get("high")) if end]
    return max([1.0, *(max(end, 1 / end) for end in ends)])


def _load(view: View) -> Iterator[str]:
    machine = view.results.manifest.machine
    load, cores = machine.get("load_average"), machine.get("usable_cores") or machine.get("cores")
    if load is not None and cores and load >= BUSY_SHARE * cores:
        yield f"Other work ran when the sweep began: a load of {load:g} on {counted(cores, 'core')}."


def _calibration(view: View) -> Iterator[str]:
    """Says whether links gave their nominal delay and rate; a direct or simulated one has none to give."""
    if all(cell.realisation in (DIRECT, SIMULATED) for cell in view.sweep.cells):
        return
    points = view.results.manifest.calibration
    shares = [float(point["share"]) for point in points if "share" in point]
    if not shares:
        yield "Whether the links gave their nominal delay was not measured with this sweep."
    elif max(shares) > 1:
        num = sum(share > 1 for share in shares)
        yield (
            f"{num} of {counted(len(shares), 'calibration point')} missed the nominal value by more than its "
            f"tolerance, the worst by {max(shares):.1f} times that: see “How it was run”."
        )


def _requests_a_point(view: View) -> Iterator[str]:
    counts = [num for cell in view.cells if (num := len(view.requests_of(cell)))]
    if counts and min(counts) < FEWEST_REQUESTS:
        what = spread(sorted({min(counts), max(counts)}))
        yield f"A point is the mean of {what} requests; fewer than {FEWEST_REQUESTS} leave wide intervals."


def _few_repeats(view: View) -> Iterator[str]:
    repeats = {cell.id: len({row.repeat for row in view.requests_of(cell)}) for cell in view.cells}
    few = [number for number in repeats.values() if 0 < number < FEWEST_REPEATS]
    if few:
        yield f"{len(few)} of {len(repeats)} cells have {spread(few)} repeats; fewer than three are few."


def _ids(cells: Sequence[CellRow]) -> str:
    return listed([f"“{cell.id}”" for cell in cells])


_CHECKS: tuple[Callable[[View], Iterator[str]], ...] = (
    _different_texts,
    _unfinished,
    _synthetic,
    _simulated,
    _dirty,
    _spread_of_equals,
    _errors,
    _inexact,
    _load,
    _calibration,
    _requests_a_point,
    _few_repeats,
    _baselines,
    _labels,
)
