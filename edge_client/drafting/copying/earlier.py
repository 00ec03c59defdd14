"""Keeps earlier texts of each user for suffix decoding: bounded, in memory, and in files where that is asked for."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import UsageError
from outrider.edge_client.drafting.copying.contexts import SEPARATOR, Contexts, SortedContexts
from outrider.edge_client.drafting.copying.sorting import sorted_places

MAX_OWNERS = 32  # whose texts are in memory; the least recently used of the key that has most are dropped
MAX_FILES = 1000  # in a store, of its key the last written; with the default tokens a user some 400 MB
_SUFFIX = ".ids"
_GROWTH = 4  # each part has more than so many times the next one's tokens, so that there are few
_KEPT_SHARE = 0.75  # of the bound, once it is reached
_MAGIC = b"outrider-suffix-store 1\n"

log = logging.getLogger("outrider")


class EarlierTexts:
    """Holds the texts of one user, at most `max_tokens`: the oldest are dropped. Thread-safe."""

    def __init__(self, max_tokens: int, tokenizer_fingerprint: str, path: Path | None = None) -> None:
        """Reads `path`, where there is such a file; a damaged one is left out, with a warning."""
        self._max_tokens, self._fingerprint, self._path = max_tokens, tokenizer_fingerprint, path
        self._lock = threading.Lock()
        self._parts: list[tuple[NDArray[np.uint32], SortedContexts]] = []  # oldest and largest first
        if path is not None and (found := _read(path, tokenizer_fingerprint)) is not None:
            self._set([found])
            self._bound()

    @property
    def contexts(self) -> tuple[Contexts, ...]:
        """Returns the texts so far, the newest first."""
        return tuple(contexts for _, contexts in reversed(self._parts))

    @property
    def num_tokens(self) -> int:
        """Returns how many tokens are kept, with one more for each text."""
        return sum(len(token_ids) for token_ids, _ in self._parts)

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds a text, and writes the file where there is one. A file that cannot be written is logged."""
        if min(len(token_ids), self._max_tokens) < 2:
            return
        text = np.array([*token_ids[-self._max_tokens :], SEPARATOR], np.uint32)
        with self._lock:
            kept = [part for part, _ in self._parts]
            while kept and len(kept[-1]) <= _GROWTH * len(text):
                text = np.concatenate([kept.pop(), text])
            self._set([*kept, text])
            self._bound()
            if self._path is not None:
                self._write(self._path)

    def check_integrity(self) -> None:
        """Asserts that the bound is kept and each text ends."""
        assert self.num_tokens <= self._max_tokens + 1, "too much is kept"
        assert all(part[-1] == SEPARATOR for part, _ in self._parts), "a text has no end"

    def _set(self, parts: Sequence[NDArray[np.uint32]]) -> None:
        known = {id(part): contexts for part, contexts in self._parts}
        self._parts = [(part, known.get(id(part)) or _sort(part)) for part in parts]

    def _bound(self) -> None:
        if self.num_tokens <= self._max_tokens:
            return
        every = np.concatenate([part for part, _ in self._parts])
        ends = np.flatnonzero(every == SEPARATOR) + 1
        surplus = len(every) - int(_KEPT_SHARE * self._max_tokens)
        first_kept = min(int(np.searchsorted(ends, surplus)), len(ends) - 2)  # the newest text stays
        start = int(ends[first_kept]) if first_kept >= 0 else 0
        most = self._max_tokens + 1  # of a file that was written with a larger bound the end alone is kept
        self._set([every[max(start, len(every) - most) :]])

    def _write(self, path: Path) -> None:
        payload = b"".join(part.astype("<u4").tobytes() for part, _ in self._parts)
        facts = {"tokenizer": self._fingerprint, "sha256": hashlib.sha256(payload).hexdigest()}
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            is_new = not path.exists()
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(_MAGIC + json.dumps(facts).encode() + b"\n" + payload)
            os.replace(beside, path)
            if is_new:
                _remove_surplus(path.parent)
        except OSError as error:
            log.warning("--suffix-store: cannot write %s: %s", path, error.strerror or error)


def _remove_surplus(directory: Path) -> None:
    """Removes what was written longest ago of the key that has most, so that at most `MAX_FILES` users have a file."""
    kept = list(directory.glob(f"*{_SUFFIX}"))
    if len(kept) > MAX_FILES:
        kept.sort(key=_written_ns)
        while len(kept) > MAX_FILES:
            kept.pop(_first_of_most([path.name.partition("-")[0] for path in kept])).unlink(missing_ok=True)


def _first_of_most(keys: Sequence[str]) -> int:
    """Returns where the most frequent key, of equals the first, is first: whose place is taken,
    so that the many users of one key leave the others theirs."""
    ((most, _),) = Counter(keys).most_common(1)
    return keys.index(most)


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process removed it
        return 0


def _sort(part: NDArray[np.uint32]) -> SortedContexts:
    return SortedContexts(part.astype("<u4").tobytes(), memoryview(sorted_places(part).data))


def _read(path: Path, tokenizer_fingerprint: str) -> NDArray[np.uint32] | None:
    """Returns what a file holds; None where there is none, or a damaged one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"--suffix-store: cannot read {path}: {error.strerror or error}") from error
    magic, facts, payload = content[: len(_MAGIC)], *content[len(_MAGIC) :].partition(b"\n")[::2]
    try:
        told = json.loads(facts)
        is_whole = told["sha256"] == hashlib.sha256(payload).hexdigest()
        is_ours = magic == _MAGIC and told["tokenizer"] == tokenizer_fingerprint
        token_ids = np.frombuffer(payload, "<u4").astype(np.uint32)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_whole = is_ours = False
    if is_whole and is_ours and len(token_ids) and token_ids[-1] == SEPARATOR:
        return token_ids
    log.warning("--suffix-store: %s is damaged or another tokenizer's: earlier texts begin anew", path)
    return None


class TextsByOwner:
    """Holds the earlier texts of several users, each apart from the others. Thread-safe."""

    def __init__(self, tokenizer_fingerprint: str, max_tokens: int, directory: Path | None = None) -> None:
        """Makes `directory`, of mode 0700, where it does not exist. Raises `UsageError` where it cannot be used."""
        self._fingerprint, self._max_tokens, self._directory = tokenizer_fingerprint, max_tokens, directory
        self._lock = threading.Lock()
        self._owners: OrderedDict[str, EarlierTexts] = OrderedDict()
        if directory is not None:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"--suffix-store {directory}: {error.strerror or error}") from error

    def of(self, owner: str) -> EarlierTexts:
        """Returns the texts of a user; "" is who needs no key."""
        with self._lock:
            found = self._owners.get(owner)
            if found is None:
                found = EarlierTexts(self._max_tokens, self._fingerprint, self._path(owner))
                self._owners[owner] = found
            self._owners.move_to_end(owner)
            while len(self._owners) > MAX_OWNERS:
                owners = list(self._owners)
                del self._owners[owners[_first_of_most([*map(_key_of, owners)])]]
        return found

    def _path(self, owner: str) -> Path | None:
        """Returns the file of a user: its name begins alike for the users of one key, tells neither the key nor whose
        it is, and has the tokenizer's."""
        if self._directory is None:
            return None
        of_key, of_owner = (_digest(each) for each in (_key_of(owner), owner))
        return self._directory / f"{of_key}-{of_owner}-{self._fingerprint[:12]}{_SUFFIX}"


def _digest(name: str) -> str:
    return hashlib.sha256(f"outrider suffixes {name}".encode()).hexdigest()[:24]


def _key_of(owner: str) -> str:
    """Returns what the users of one API key have in common: an owner is a key's digest, a space and a user."""
    return owner.partition(" ")[0]
