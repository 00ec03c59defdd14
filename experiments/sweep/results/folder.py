"""Writing a results folder: rows appended as they come, and going on with one that was left unfinished."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.common.errors import UsageError
from outrider.experiments.shared.results import git_state
from outrider.experiments.sweep.machine import machine_facts, package_versions
from outrider.experiments.sweep.results.records import (
    MANIFEST,
    REQUESTS,
    ROUNDS,
    SWEEP,
    VISITS,
    Manifest,
    RequestRow,
    RoundRow,
    VisitRow,
    latest_requests,
    read_manifest,
    read_rows,
    to_json,
    write_json,
)


class ResultsFolder:
    """Writes rows, from several threads too. A request's rounds are written before its own row, so that a
    request that is there is whole."""

    def __init__(self, path: Path, manifest: Manifest, done: frozenset[str] = frozenset()) -> None:
        self.path, self.manifest = path, manifest
        self.done = done  # requests that need not be run again
        self._lock = threading.Lock()

    def add_request(self, request: RequestRow, rounds: Iterable[RoundRow]) -> None:
        """Appends a request and its rounds."""
        with self._lock:
            _append(self.path / ROUNDS, rounds)
            _append(self.path / REQUESTS, [request])

    def add_visit(self, visit: VisitRow) -> None:
        """Appends a visit."""
        with self._lock:
            _append(self.path / VISITS, [visit])

    def update_manifest(self, **changes: Any) -> None:
        """Writes the manifest with some fields changed."""
        self.manifest = dataclasses.replace(self.manifest, **changes)
        write_json(self.path / MANIFEST, self.manifest)


def timestamp() -> str:
    """Returns the time now, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def new_manifest(program: str, name: str, config: dict[str, Any], seed: int) -> Manifest:
    """Returns the manifest of a run that begins: what is known before anything ran."""
    commit, is_dirty = git_state()
    return Manifest(
        name=name,
        commit=commit,
        is_dirty=is_dirty,
        command=f"{program} {shlex.join(sys.argv[1:])}".strip(),
        config=config,
        models={},
        machine=machine_facts(),
        seeds={"sampling": seed, "order": seed},
        realisation={},
        calibration=[],
        started=timestamp(),
        versions=package_versions(),
    )


def create_folder(path: Path, manifest: Manifest, is_resumable: bool = True) -> ResultsFolder:
    """Makes a folder. Raises `UsageError` for one that holds results already, or cannot be made."""
    if any(read_rows(path / REQUESTS, RequestRow)):
        ways = "go on with them by --resume, or give another --out" if is_resumable else "give another --out"
        raise UsageError(f"{path} holds results already: {ways}")
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / MANIFEST, manifest)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from error
    return ResultsFolder(path, manifest)


def resume_folder(path: Path, config: dict[str, Any], visit_sizes: Mapping[str, int]) -> ResultsFolder:
    """Opens a folder to go on with. Requests that ended without an error are done, where `visit_sizes` has their cell
    only once all of their visit's, so many, have; what a crash left of others is removed.

    Raises `UsageError` for a folder without results, and for one of another configuration: the message names
    the first key that differs.
    """
    manifest = read_manifest(path)
    theirs, ours = manifest.config, json.loads(json.dumps(config))
    for key in (*ours, *theirs):
        if ours.get(key) != theirs.get(key):
            was, now = (textwrap.shorten(json.dumps(config.get(key)), 100) for config in (theirs, ours))
            raise UsageError(f"{path} was made with {key}: {was}, not {now}: give another --out")
    done = {
        row.request: row for row in latest_requests(read_rows(path / REQUESTS, RequestRow)) if not row.error
    }
    sizes = Counter((row.cell, row.repeat) for row in done.values())

    def is_whole(row: RequestRow | VisitRow) -> bool:  # a visit's last requests alone would meet another load
        return sizes[row.cell, row.repeat] >= visit_sizes.get(row.cell, 0)

    done = {id: row for id, row in done.items() if is_whole(row)}
    rounds = [row for row in read_rows(path / ROUNDS, RoundRow) if row.request in done]
    visits = [row for row in read_rows(path / VISITS, VisitRow) if is_whole(row)]
    _rewrite(path / REQUESTS, list(done.values()))
    _rewrite(path / ROUNDS, rounds)
    _rewrite(path / VISITS, visits)
    (path / SWEEP).unlink(missing_ok=True)  # it tells of less than there will be
    return ResultsFolder(path, manifest, frozenset(done))


def _append(path: Path, rows: Iterable[Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(to_json(row), allow_nan=False) + "\n" for row in rows)


def _rewrite(path: Path, rows: Sequence[Any]) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.unlink(missing_ok=True)
    partial.touch()
    _append(partial, rows)
    partial.replace(path)
