"""A sweep from its first request to its folder: visits in interleaved order, then what they come to."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.shared.prompts import Prompt, load_prompts
from outrider.experiments.sweep.config.cells import Cell, make_cells
from outrider.experiments.sweep.config.schema import SweepConfig, resolved
from outrider.experiments.sweep.edges import EdgePool
from outrider.experiments.sweep.linking import check_links
from outrider.experiments.sweep.progress import Progress, create_progress
from outrider.experiments.sweep.results.folder import (
    ResultsFolder,
    create_folder,
    new_manifest,
    resume_folder,
    timestamp,
)
from outrider.experiments.sweep.results.judging import Judge
from outrider.experiments.sweep.results.records import (
    RequestRow,
    RoundRow,
    Sweep,
    VisitRow,
    read_results,
)
from outrider.experiments.sweep.results.summarising import ByCell, Losses, by_cell, summarise, write_summary
from outrider.experiments.sweep.results.texts import JudgeTie
from outrider.experiments.sweep.verifiers import VerifierPool
from outrider.experiments.sweep.visiting import Request, Visitor


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds everything that is decided before anything runs."""

    config: SweepConfig
    cells: list[Cell]
    prompts: list[Prompt]

    def requests_of(self, cell: Cell, repeat: int) -> list[Request]:
        """Returns the requests of a cell: each session decodes every prompt, and starts with another one."""
        found = []
        for session in range(cell.num_sessions):
            shift = session % len(self.prompts)
            for prompt in (*self.prompts[shift:], *self.prompts[:shift]):
                id = f"{cell.id}/{repeat}/{session}/{prompt.id}"
                found.append(Request(id, session, prompt))
        return found

    def visits(self) -> Iterator[tuple[int, Cell]]:
        """Yields every cell once in each repeat, in an order of its own: what drifts hits all cells alike."""
        for repeat in range(self.config.repeats):
            order = list(self.cells)
            random.Random(f"{self.config.seed} {repeat}").shuffle(order)
            yield from ((repeat, cell) for cell in order)

    def resolved(self) -> dict[str, Any]:
        """Returns what a folder's manifest keeps: only the same may go on in it."""
        own = {"cells": [cell.id for cell in self.cells], "prompts_sha256": _prompts_hash(self.prompts)}
        return resolved(self.config) | own

    @property
    def sizes_of_shared_visits(self) -> dict[str, int]:
        """Returns the requests of one visit of each cell whose sessions run side by side."""
        cells = [cell for cell in self.cells if cell.num_sessions > 1]
        return {cell.id: cell.num_sessions * len(self.prompts) for cell in cells}

    @property
    def num_requests(self) -> int:
        """Returns the requests of all repeats."""
        sessions = sum(cell.num_sessions for cell in self.cells)
        return self.config.repeats * sessions * len(self.prompts)


def make_plan(config: SweepConfig, only: Sequence[str] = ()) -> Plan:
    """Makes the plan of the cells whose id contains one of `only`, or of all. Raises `UsageError` for what
    cannot be run."""
    cells = make_cells(config)
    if only:
        cells = _pick_cells(cells, only)
    check_links(config.realisation, [cell.link for cell in cells if cell.has_link])
    path = Path(config.prompts) if config.prompts else None
    prompts = load_prompts(path, config.num_prompts, named="prompts:")
    if len(prompts) < config.num_prompts:
        raise UsageError(f"num_prompts: is {config.num_prompts}, and there are {len(prompts)} prompts")
    return Plan(config, cells, prompts)


def run_sweep(plan: Plan, out: Path, is_resumed: bool, is_silent: bool) -> Sweep:
    """Runs what is not done yet and writes the folder. After Ctrl-C `Sweep.is_complete` is False.

    Raises `UsageError` for a folder that cannot be used, and what the product raises where it cannot start.
    """
    config = plan.resolved()
    if is_resumed:
        folder = resume_folder(out, config, plan.sizes_of_shared_visits)
    else:
        folder = create_folder(out, new_manifest("edge-client", plan.config.name, config, plan.config.seed))
    progress = create_progress(plan.num_requests, len(folder.done), is_silent)
    judge = Judge(plan.config, plan.cells, plan.prompts)
    is_complete, losses = False, Losses()
    try:
        _run_visits(plan, folder, progress)
        is_complete = True
        if plan.config.quality:
            losses = judge.losses(_rows_of(folder).requests)
    except KeyboardInterrupt:
        progress.say("interrupted: writing what there is")
    finally:
        progress.close()
        with _no_interrupts():
            sweep = _finish(plan, folder, judge.is_tie if is_complete else _unknown, losses, is_complete)
    return sweep


def _finish(plan: Plan, folder: ResultsFolder, is_tie: JudgeTie, losses: Losses, is_complete: bool) -> Sweep:
    results = read_results(folder.path)
    sweep = summarise(plan.config, plan.cells, _rows_of(folder), is_tie, losses, is_complete)
    write_summary(folder.path, sweep)
    folder.update_manifest(
        finished=timestamp(),
        models=_models(results.requests),
        realisation=_link_facts(plan, results.visits),
    )
    return sweep


def _rows_of(folder: ResultsFolder) -> ByCell:
    results = read_results(folder.path)
    return by_cell(results.requests, results.rounds, results.visits)


def _pick_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    picked = [cell for cell in cells if any(part in cell.id for part in only)]
    if not picked:
        raise UsageError(f"--only {' '.join(only)}: no cell's name has it; --list prints them")
    ids = {cell.id for cell in picked}
    return [cell for cell in picked if not cell.twin or cell.twin in ids]


# ------------------------------------------------------------------------------------------- visits


def _run_visits(plan: Plan, folder: ResultsFolder, progress: Progress) -> None:
    is_over = threading.Event()

    def on_request(row: RequestRow, rounds: list[RoundRow]) -> None:
        if not is_over.is_set():  # what fails because everything is being stopped is not a result
            folder.add_request(row, rounds)
            progress.step(row.cell)
            if row.error:
                progress.say(f"{row.request}: {row.error}")

    todo = [
        (cell, repeat, left)
        for repeat, cell in plan.visits()
        if (left := [request for request in plan.requests_of(cell, repeat) if request.id not in folder.done])
    ]
    with VerifierPool(plan.config) as verifiers, EdgePool(folder.path / "edges.log") as edges:
        visitor = Visitor(plan.config, plan.prompts, edges, verifiers)
        try:
            _calibrate(plan, folder, progress)
            visitor.read_prompts([cell for cell, _, _ in todo])
            progress.begin()
            for cell, repeat, requests in todo:
                folder.add_visit(visitor.visit(cell, repeat, requests, on_request))
        except BaseException:
            is_over.set()
            edges.kill()
            raise


def _calibrate(plan: Plan, folder: ResultsFolder, progress: Progress) -> None:
    if not plan.config.calibrate or folder.manifest.calibration:
        return
    from outrider.experiments.sweep.linking import calibrate_links

    progress.say("calibrating the links")
    profiles = {cell.link.name: cell.link for cell in plan.cells if cell.has_link}
    found = calibrate_links(plan.config.realisation, list(profiles.values()))
    folder.update_manifest(calibration=found)


# ----------------------------------------------------------------------------------------- manifest


def _models(requests: Sequence[RequestRow]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in requests:
        for name, value in (
            ("target", row.target),
            ("target_fingerprint", row.target_fingerprint),
            ("draft_fingerprint", row.draft_fingerprint),
        ):
            if value:
                found.setdefault(name, value)
    return found


def _prompts_hash(prompts: Sequence[Prompt]) -> str:
    lines = [json.dumps([prompt.id, prompt.text]) for prompt in prompts]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _link_facts(plan: Plan, visits: Sequence[VisitRow]) -> dict[str, Any]:
    names = {cell.id: cell.link.name for cell in plan.cells if cell.has_link}
    found: dict[str, Any] = {}
    for visit in visits:
        if visit.link_facts and visit.cell in names:
            found.setdefault(names[visit.cell], visit.link_facts)
    return found


def _unknown(row: RequestRow, index: int, token_id: int) -> bool | None:
    return None


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ignores a second Ctrl-C, which must not leave half a folder: writing it takes moments."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
