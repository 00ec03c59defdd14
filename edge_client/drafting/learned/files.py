"""Files of learned heads: one for each draft and target in a directory, mode 0600, replaced in one step."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.common.errors import ModelError, UsageError
from outrider.edge_client.drafting.learned.head import HeadSettings, LearnedCounts, LearnedHead

_VERSION = 1
_SUFFIX = ".learned.npz"
_SHOWN = 8  # digits of a fingerprint in a file's name


def check_directory(directory: Path) -> None:
    """Makes a directory for heads. Raises `UsageError` naming --learn."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--learn {directory}: it cannot be made a directory: {error.strerror}") from error


def head_path(directory: Path, draft_fingerprint: str, target_fingerprint: str) -> Path:
    """Returns where the head of a draft and a target is kept."""
    return directory / f"{draft_fingerprint[:_SHOWN]}-{target_fingerprint[:_SHOWN]}{_SUFFIX}"


def head_paths(directory: Path) -> list[Path]:
    """Returns the files of all heads in a directory."""
    return sorted(directory.glob(f"*{_SUFFIX}"))


def save_head(path: Path, head: LearnedHead, draft_fingerprint: str, target_fingerprint: str) -> None:
    """Writes a head beside its file and then puts it in its place. Raises `UsageError` where it cannot be written, or
    is not finite."""
    if not (np.isfinite(head.table).all() and math.isfinite(head.gain)):
        raise UsageError(f"--learn {path.parent}: the head cannot be saved: it is not finite")
    facts = {
        "version": _VERSION,
        "draft_fingerprint": draft_fingerprint,
        "target_fingerprint": target_fingerprint,
        "settings": dataclasses.asdict(head.settings),
        "counts": dataclasses.asdict(head.counts),
        "gain": head.gain,
    }
    scratch = ""
    try:
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, table=head.table, facts=np.array(json.dumps(facts)))
        os.replace(scratch, path)
    except OSError as error:
        if scratch:
            Path(scratch).unlink(missing_ok=True)
        raise UsageError(f"--learn {path.parent}: the head cannot be saved: {error.strerror}") from error


def read_facts(path: Path) -> dict[str, Any]:
    """Returns what a file says of its head. Raises `ModelError` where it is damaged or of another version."""
    return _read(path)[0]


def load_head(path: Path, head: LearnedHead, draft_fingerprint: str, target_fingerprint: str) -> None:
    """Fills a head from its file. Raises `ModelError` where the file is damaged, of another version, draft or target,
    or was learned with other settings."""
    facts, table = _read(path)
    wanted = {
        "draft": (facts["draft_fingerprint"], draft_fingerprint),
        "target": (facts["target_fingerprint"], target_fingerprint),
        "head settings": (facts["settings"], dataclasses.asdict(head.settings)),
    }
    for what, (found, expected) in wanted.items():
        if found != expected:
            raise ModelError(f"{path} was learned with another {what}: {_way_out(path)}")
    if table.shape != head.table.shape:
        raise ModelError(f"{path} is damaged: {_way_out(path)}")
    head.table[:] = table
    head.counts = LearnedCounts(**facts["counts"])
    head.gain = float(facts["gain"])


def _read(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, np.dtype[np.float32]]]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            facts, table = json.loads(str(file["facts"])), file["table"]
        version = facts["version"]
        if version == _VERSION:
            _check(facts, table)
    except Exception as error:  # what a damaged archive raises is not told by numpy or zipfile
        raise ModelError(f"{path} is damaged: {_way_out(path)}") from error
    if version != _VERSION:
        raise ModelError(f"{path} has version {version}, this release reads {_VERSION}: {_way_out(path)}")
    return facts, table


def _check(facts: dict[str, Any], table: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Raises where a file's content is not what `save_head` writes."""
    settings, counts = HeadSettings(**facts["settings"]), LearnedCounts(**facts["counts"])
    numbers = [*dataclasses.astuple(settings), *dataclasses.astuple(counts), facts["gain"]]
    whole = (settings.rank, settings.window, counts.num_tokens, counts.num_drafting)
    texts = (facts["draft_fingerprint"], facts["target_fingerprint"])
    if not all(type(each) in (int, float) and math.isfinite(each) for each in numbers):
        raise ValueError("a number is none, or not finite")
    if not all(type(each) is int and each >= 0 for each in whole):
        raise ValueError("a count is none")
    if not all(type(each) is str for each in texts):
        raise ValueError("a fingerprint is none")
    if table.dtype != np.float32 or not np.isfinite(table).all():
        raise ValueError("the table is none, or not finite")


def _way_out(path: Path) -> str:
    return f"`edge-client draft learned reset {path.parent}` lets it begin anew"
