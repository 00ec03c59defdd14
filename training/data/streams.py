"""Token streams on disk: one flat uint16 array per split, documents separated by `<|endoftext|>` (id 0)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from outrider.training.data.corpus import Corpus

Tokens = npt.NDArray[np.uint16 | np.uint32]
"""uint16 for the embedded pair; uint32 where a vocabulary is larger."""


def encode_corpus(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> None:
    """Write `train.npz`, `functions.npz` and `heldout.npz` (one array per held-out file), compressed: they
    may travel.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in (("train", corpus.train), ("functions", corpus.functions)):
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(documents):
            ids.append(0)
            ids.extend(encoding.ids)
        stream = {name: np.asarray(ids, dtype=np.uint16)}
        np.savez_compressed(directory / f"{name}.npz", **stream)  # type: ignore[arg-type]
    held_out = {
        name: np.asarray([0, *tokenizer.encode(text).ids], dtype=np.uint16)
        for name, text in corpus.held_out.items()
    }
    np.savez_compressed(directory / "heldout.npz", **held_out)  # type: ignore[arg-type]


def load_train(directory: Path) -> Tokens:
    """Reads the training stream, [num_tokens] uint16. Raises FileNotFoundError naming the file."""
    return _load_stream(directory, "train")


def load_functions(directory: Path) -> Tokens:
    """Reads the training text's functions with docstrings, likewise."""
    return _load_stream(directory, "functions")


def load_code(directory: Path) -> Tokens:
    """Reads what a draft is asked for, the functions, and as much of the other training text."""
    functions = load_functions(directory)
    return np.concatenate([functions, load_train(directory)[: len(functions)]])


def load_held_out(directory: Path) -> dict[str, Tokens]:
    """Reads the held-out files by name, each [num_tokens] uint16 with the separator in front."""
    with np.load(directory / "heldout.npz") as archive:
        return {name: archive[name] for name in archive.files}


def _load_stream(directory: Path, name: str) -> Tokens:
    with np.load(directory / f"{name}.npz") as archive:
        stream: Tokens = archive[name]
    return stream


@dataclass
class Batches:
    """Draws random windows of the stream without replacement within an epoch; the state is (seed, epoch,
    cursor).

    Each epoch cuts the stream into windows at another phase and takes them in another order. `next(length,
    rows)` gives [rows, length + 1] int64: inputs and, shifted by one, their targets.
    """

    stream: Tokens
    seed: int = 0
    epoch: int = 0
    cursor: int = 0
    """Tokens already taken in this epoch."""

    def __post_init__(self) -> None:
        self._order: tuple[tuple[int, int], npt.NDArray[np.int64]] = ((-1, 0), np.empty(0, np.int64))

    def next(self, length: int, rows: int) -> npt.NDArray[np.int64]:
        """Returns the next batch, [rows, length + 1] int64."""
        starts = self._starts(self.epoch, length)
        first = -(-self.cursor // length)
        if first + rows > len(starts):
            self.epoch, first = self.epoch + 1, 0
            starts = self._starts(self.epoch, length)
        if rows > len(starts):
            raise ValueError(f"{len(self.stream):,} tokens are too few for {rows} windows of {length}")
        self.cursor = (first + rows) * length
        places = starts[first : first + rows, None] + np.arange(length + 1)
        batch: npt.NDArray[np.int64] = self.stream[places].astype(np.int64)
        return batch

    def _starts(self, epoch: int, length: int) -> npt.NDArray[np.int64]:
        if self._order[0] != (epoch, length):
            rng = np.random.default_rng([self.seed, epoch])
            phase = int(rng.integers(length)) if epoch else 0
            starts = np.arange(phase, len(self.stream) - length, length)
            self._order = (epoch, length), rng.permutation(starts)
        return self._order[1]


def windows(tokens: Tokens, length: int) -> Iterator[npt.NDArray[np.int64]]:
    """Cut one file into consecutive windows of at most `length + 1` tokens that overlap by one."""
    for start in range(0, len(tokens) - 1, length):
        yield tokens[start : start + length + 1].astype(np.int64)
