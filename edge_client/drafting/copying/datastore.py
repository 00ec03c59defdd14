"""Files of tokenised texts with their sorted contexts, which `--draft-strategy retrieval` copies from.

    magic line | header, JSON, filled with spaces up to 4,096 bytes | token ids | places by their contexts

Ids and places are 32-bit little-endian. A file is mapped into memory: of a large one, only what look-ups touch is read.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from outrider.common.errors import IncompatibleError, ModelError, UsageError
from outrider.edge_client.drafting.copying.contexts import SEPARATOR, TOKEN_BYTES, SortedContexts, pack
from outrider.edge_client.drafting.copying.sorting import NUM_SORTS, sorted_places

_MAGIC = b"outrider-datastore 1\n"
_START = 4096  # bytes before the ids
_CHUNK = 1 << 16  # characters that are tokenised at once; a text is cut at the end of a line
_NUM_SAMPLES = 64  # places that are looked at when a file is opened
_MAX_TOKENS = 2**32 - 1  # places are 32-bit

OnProgress = Callable[[float, str], None]
"""Told the share that is done, from 0 to 1, and what is done now."""


class Datastore:
    """Is an open datastore. Raises `ModelError` where it is truncated or seen to be damaged, `IncompatibleError` where
    another tokenizer made it."""

    def __init__(self, path: Path, tokenizer_fingerprint: str) -> None:
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # an empty file cannot be mapped
            raise ModelError(f"--datastore {path} cannot be read: {error}") from error
        self.num_tokens, num_places, made_by = _read_header(path, content)
        size = _START + TOKEN_BYTES * (self.num_tokens + num_places)
        if len(content) != size:
            raise ModelError(
                f"--datastore {path} is truncated or damaged: it has {len(content)} bytes of {size}; build it again"
            )
        if made_by != tokenizer_fingerprint:
            raise IncompatibleError(
                f"--datastore {path} was built with another tokenizer ({made_by[:12]}) than the draft's",
                "build it with `edge-client draft datastore build FILES OUT --draft DIR`",
            )
        first_place = _START + TOKEN_BYTES * self.num_tokens
        order = memoryview(content)[first_place:].cast("I")
        self.contexts = SortedContexts(content, order, _START, first_place)
        self._check_order(path, order)

    def _check_order(self, path: Path, order: memoryview) -> None:
        """Refuses what a few looks find; what they miss is left out when it is found (`CopyExpander.count`)."""
        step = max(1, len(order) // _NUM_SAMPLES)
        places = [order[index] for index in range(0, len(order), step)]
        is_inside = all(0 < place < self.num_tokens for place in places)
        contexts = [self.contexts.context(place) for place in places] if is_inside else []
        if not self._ends() or not is_inside or contexts != sorted(contexts):
            raise ModelError(f"--datastore {path} is damaged: its places are not in order; build it again")

    def _ends(self) -> bool:
        """Returns whether the last text ends where the header says."""
        last = self.num_tokens - 1
        return last >= 0 and self.contexts.follower(last, ()) is None


def _read_header(path: Path, content: mmap.mmap) -> tuple[int, int, str]:
    if content[: len(_MAGIC)] != _MAGIC:
        raise ModelError(f"--datastore {path} is no datastore: `edge-client draft datastore build` makes one")
    try:
        header = json.loads(content[len(_MAGIC) : _START])
        num_tokens, num_places = int(header["num_tokens"]), int(header["num_places"])
        if not 0 <= num_places < num_tokens:
            raise ValueError(f"{num_places} places of {num_tokens} tokens")
        return num_tokens, num_places, str(header["tokenizer"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ModelError(
            f"--datastore {path} is damaged: its header cannot be read; build it again"
        ) from error


def build_datastore(
    files: Sequence[Path],
    out: Path,
    encode: Callable[[str], Sequence[int]],
    tokenizer_fingerprint: str,
    on_progress: OnProgress = lambda share, what: None,
) -> tuple[int, int]:
    """Writes the datastore of text files; returns its tokens and its bytes. `out` is replaced once all is written.

    Raises `UsageError` for a file that cannot be read or is not UTF-8, where there is no text, and where `out` is
    another file, which stays, or a directory.
    """
    if out.is_dir():
        raise UsageError(f"{out} is a directory: name the datastore to write last, after the files")
    if out.is_file() and not _is_datastore(out):
        raise UsageError(
            f"{out} exists and is no datastore: name the datastore to write last, after the files"
        )
    beside = out.with_name(f"{out.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(b" " * _START)
            for ids in _encoded(files, encode, on_progress):
                file.write(pack(ids))
        token_ids = np.fromfile(beside, "<u4", offset=_START)
        if not 2 < len(token_ids) <= _MAX_TOKENS:
            raise UsageError(
                f"{len(token_ids)} tokens are no datastore: give text files with more, or with fewer"
            )
        places = sorted_places(
            token_ids, lambda number: on_progress(0.7 + 0.3 * number / NUM_SORTS, "sorting")
        )
        facts = {"tokenizer": tokenizer_fingerprint, "num_tokens": len(token_ids), "num_places": len(places)}
        with beside.open("r+b") as file:
            file.write(_MAGIC + json.dumps(facts).encode())
            file.seek(0, os.SEEK_END)
            file.write(places.astype("<u4").data)
        os.replace(beside, out)
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)
    return len(token_ids), out.stat().st_size


def _is_datastore(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _encoded(
    files: Sequence[Path], encode: Callable[[str], Sequence[int]], on_progress: OnProgress
) -> Iterator[Sequence[int]]:
    """Yields ids of all files in order, a `SEPARATOR` after each file."""
    sizes = [path.stat().st_size for path in files]
    num_done, total = 0, max(1, sum(sizes))
    for path, size in zip(files, sizes, strict=True):
        done_here = 0
        for text in _chunks(path):
            yield encode(text)
            done_here += len(text.encode())
            on_progress(0.7 * (num_done + min(done_here, size)) / total, f"tokenising {path.name}")
        yield (SEPARATOR,)
        num_done += size


def _chunks(path: Path) -> Iterable[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_CHUNK):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8, from byte {error.start + 1} of a part on") from error
