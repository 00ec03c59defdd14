"""Token streams on disk: one flat uint16 array per split, documents separated by `<|endoftext|>` (id 0)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from training.corpus import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.NDArray[np.uint16]


def encode_corpus(corpus: Corpus, tokenizer: "Tokenizer", directory: Path) -> None:
    """Write `train.npy` and `heldout.npz` (one array per held-out file)."""
    directory.mkdir(parents=True, exist_ok=True)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(corpus.train):
        ids.append(0)
        ids.extend(encoding.ids)
    np.save(directory / "train.npy", np.asarray(ids, dtype=np.uint16))
    held_out = {
        name: np.asarray([0, *tokenizer.encode(text).ids], dtype=np.uint16)
        for name, text in corpus.held_out.items()
    }
    np.savez(directory / "heldout.npz", **held_out)  # type: ignore[arg-type]


def load_train(directory: Path) -> Tokens:
    """The training stream, [num_tokens] uint16."""
    stream: Tokens = np.load(directory / "train.npy")
    return stream


def load_held_out(directory: Path) -> dict[str, Tokens]:
    """Held-out files by name, each [num_tokens] uint16 with the separator in front."""
    with np.load(directory / "heldout.npz") as archive:
        return {name: archive[name] for name in archive.files}


@dataclass
class Batches:
    """Random windows of the stream without replacement within an epoch; the state is (seed, epoch, cursor).

    A window is a cut at a random phase, so two epochs see different cuts. `next(length, rows)` gives
    [rows, length + 1] int64: inputs and, shifted by one, their targets.
    """

    stream: Tokens
    seed: int = 0
    epoch: int = 0
    cursor: int = 0
    """Tokens already taken in this epoch."""

    def next(self, length: int, rows: int) -> npt.NDArray[np.int64]:
        need = rows * length
        if self.cursor + need + 1 > len(self.stream):
            self.epoch, self.cursor = self.epoch + 1, 0
        rolled = self._shuffled()
        flat = rolled[self.cursor : self.cursor + need + 1]
        self.cursor += need
        starts = np.arange(rows) * length
        return np.stack([flat[s : s + length + 1] for s in starts]).astype(np.int64)

    def _shuffled(self) -> Tokens:
        """The documents were shuffled when the corpus was built; an epoch only rotates the stream."""
        phase = int(np.random.default_rng([self.seed, self.epoch]).integers(len(self.stream)))
        return np.roll(self.stream, -phase) if self.epoch else self.stream


def windows(tokens: Tokens, length: int) -> Iterator[npt.NDArray[np.int64]]:
    """Cut one file into consecutive windows of at most `length + 1` tokens that overlap by one."""
    for start in range(0, len(tokens) - 1, length):
        yield tokens[start : start + length + 1].astype(np.int64)
