"""A played system as a results folder of `edge-client bench`: rows, and figures with intervals.

A group of edges is a cell. Every file but the manifest, which says when, is the same for the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.edge_client.config.tree import tree_use
from outrider.experiments.simulator.config import EdgePlan, System
from outrider.experiments.simulator.figures.outcome import SystemFigures, figures_of
from outrider.experiments.simulator.parts.edges import PacedSession, RequestLog
from outrider.experiments.simulator.run import Progress, play
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.config.schema import SIMULATED, SweepConfig, Variant, link_record
from outrider.experiments.sweep.observing import Errand, observe
from outrider.experiments.sweep.results.folder import ResultsFolder, create_folder, new_manifest, timestamp
from outrider.experiments.sweep.results.records import Manifest, Sweep, VisitRow, read_results
from outrider.experiments.sweep.results.summarising import by_cell, summarise, write_summary


class Recorder:
    """Runs sessions as `edge-client bench` observes them; `cells` are those of the edges, by number."""

    def __init__(self, folder: ResultsFolder, cells: Sequence[Cell], repeat: int, seed: int) -> None:
        self._folder, self._cells = folder, cells
        self._repeat, self._seed = repeat, seed

    def follow(self, session: PacedSession, log: RequestLog) -> None:
        """Runs a session and records it. Requests under way when the world ends leave no row."""
        cell = self._cells[log.edge]
        name = log.ask.name or f"text-{log.ask.text}"
        id = f"{cell.id}/{self._repeat}/{log.edge}/{log.number}-{name}"
        errand = Errand(cell.id, id, self._repeat, log.edge, name, self._seed, link_opened_s=0.0)
        clock, num_prompt_tokens = session.clock, log.ask.num_prompt_tokens
        row, rounds = observe(session, errand, num_prompt_tokens, clock, clock.now)  # type: ignore[arg-type]
        log.error, log.is_finished = row.error, not row.error
        self._folder.add_request(row, rounds)


def play_into(system: System, out: Path, on_progress: Progress | None = None) -> tuple[SystemFigures, float]:
    """Plays, writes, and returns the figures and the seconds it took. Raises `UsageError` for a folder that
    cannot be used."""
    cells = [_cell_of(plan, system) for plan in system.edges]
    by_edge = [cell for cell in cells for _ in range(cell.num_sessions)]
    config = _config_of(system)
    folder = create_folder(
        out, make_manifest(system.config.name, _content(system), system.config.seed), is_resumable=False
    )
    recorder = Recorder(folder, by_edge, 0, system.config.seed)
    logs: list[RequestLog] = []
    played = play(system, on_progress, follow_session=recorder.follow, on_request=logs.append)
    for cell in cells:
        folder.add_visit(visit_of(cell, 0, [log for log in logs if by_edge[log.edge] is cell]))
    finish(folder, config, cells)
    return figures_of(played), played.wall_s


def visit_of(cell: Cell, repeat: int, logs: Sequence[RequestLog]) -> VisitRow:
    """Returns the row of one visit; `logs` are the cell's own."""
    logs = [log for log in logs if log.is_finished]
    start_s = min((log.start_s for log in logs), default=0.0)
    end_s = max((log.end_s for log in logs), default=0.0)
    return VisitRow(
        cell=cell.id,
        repeat=repeat,
        wall_s=round(end_s - start_s, 6),
        num_requests=len(logs),
        num_tokens=sum(log.num_tokens for log in logs),
        link_facts={"realisation": SIMULATED},
    )


def finish(folder: ResultsFolder, config: SweepConfig, cells: Sequence[Cell]) -> Sweep:
    """Writes the summary and closes the manifest."""
    results = read_results(folder.path)
    rows = by_cell(results.requests, results.rounds, results.visits)
    sweep = summarise(config, cells, rows, lambda row, index, token_id: None, {}, True)
    write_summary(folder.path, sweep)
    folder.update_manifest(finished=timestamp())
    return sweep


def make_manifest(
    name: str, config: dict[str, Any], seed: int, program: str = "python -m outrider.experiments.simulator"
) -> Manifest:
    """Returns the manifest of a simulated run."""
    return dataclasses.replace(
        new_manifest(program, name, config, seed),
        models={"target": "simulated"},
        realisation={SIMULATED: {"realisation": SIMULATED}},
    )


def _cell_of(plan: EdgePlan, system: System) -> Cell:
    config, verifiers = plan.config, {each.group.name: each for each in system.verifiers}
    return Cell(
        link=plan.link,
        mode=config.mode,
        depth_policy=config.depth_policy,
        num_speculative_tokens=config.depth.num_speculative_tokens,
        tree=tree_use(config),
        method=config.verification.method,
        tls=False,
        temperature=config.sampling.temperature,
        num_sessions=plan.group.count,
        min_forward_ms=verifiers[plan.verifiers].config.min_forward_ms,
        min_draft_ms=config.min_draft_ms,
        variant=Variant(name=plan.group.name),
    )


def _config_of(system: System) -> SweepConfig:
    is_given = any(not isinstance(plan.group.acceptance, str) for plan in system.edges)
    return SweepConfig(
        name=system.config.name,
        links=tuple(link_record(plan.link) for plan in system.edges),
        realisation=SIMULATED,
        models="synthetic" if is_given else "embedded",
        baselines=(),
        a_a=False,
        repeats=1,
        seed=system.config.seed,
        calibrate=False,
    )


def _content(system: System) -> dict[str, Any]:
    return {**dataclasses.asdict(system.config), "measured_times": dataclasses.asdict(system.times)}
