"""Train the target on functions that it wrote itself and that parse.

Dong et al. 2023 (RAFT, https://arxiv.org/abs/2304.06767): let the model write, keep what a judge accepts,
train on that. The judge here is Python's parser, and that nothing in the text repeats; the heads are those of
the training text's functions with docstrings. Next-token loss alone does not see a bracket left open.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from outrider.training.common.checkpoint import write_json
from outrider.training.common.metrics import repeated_runs
from outrider.training.common.optim import Rates
from outrider.training.common.progress import Progress
from outrider.training.common.schedule import Phase, Schedule
from outrider.training.common.workers import Group
from outrider.training.data.functions import documented_functions, first_function, is_python
from outrider.training.data.streams import Tokens, load_functions, load_train
from outrider.training.draft.sampling import continue_together
from outrider.training.target.train import TargetConfig, TargetTrainer
from outrider.training.target.unlikelihood import RUN, UnlikelihoodConfig


@dataclass(frozen=True)
class PolishConfig:
    """Says how much the target writes, and how it learns from it."""

    samples: int = 2
    """Of each head; a multiple of the workers."""
    num_tokens: int = 112
    """A function that has not ended by then is dropped."""
    temperature: float = 0.6
    longest_head: int = 192
    """Tokens; what has a longer head is left out."""
    most_rows: int = 128
    """Texts written at a time."""
    training: TargetConfig = field(
        default_factory=lambda: TargetConfig(
            tokens=400_000,
            phases=(Phase(0.0, length=256, rows=16, functions=0.6),),
            unlikelihood=UnlikelihoodConfig(start=0.0, weight=0.3),
            schedule=Schedule(warmup=0.05, decay_start=0.3),
            rates=Rates().times(0.1),
        )
    )


PRESETS = {
    "cpu": PolishConfig(),
    "gpu": PolishConfig(
        samples=4,
        most_rows=2048,
        training=replace(
            PolishConfig().training,
            tokens=4_000_000,
            phases=(Phase(0.0, length=512, rows=64, functions=0.6),),
            unlikelihood=UnlikelihoodConfig(start=0.0, rows=512, step_rows=64, weight=0.3),
            micro_tokens=65_536,
        ),
    ),
}
"""For the embedded pair, by where it is made."""


def heads_by_length(
    functions: Tokens, tokenizer: Tokenizer, longest: int
) -> dict[int, npt.NDArray[np.int64]]:
    """Returns the heads of a stream of functions: number of ids → [heads, ids]."""
    found = defaultdict(list)
    for ids in np.split(functions, np.flatnonzero(functions == 0)):
        for function in documented_functions(tokenizer.decode(ids.tolist())):
            head = tokenizer.encode(function.head).ids
            if len(head) <= longest:
                found[len(head)].append(head)
    return {length: np.asarray(heads, dtype=np.int64) for length, heads in sorted(found.items())}


def keep(head: list[int], new: list[int], tokenizer: Tokenizer) -> list[int] | None:
    """Returns head and first function of a completion, the separator in front, where the function has
    ended, parses and repeats nothing; otherwise None."""
    has_ended = 0 in new
    text = tokenizer.decode(new[: new.index(0)] if has_ended else new)
    body = first_function(text)
    if not (has_ended or body != text) or not is_python(tokenizer.decode(head), body):
        return None
    ids = tokenizer.encode(body.rstrip() + "\n").ids
    return None if any(repeated_runs(ids, RUN)) else [0, *head, *ids]


class Writer:
    """Lets a target write functions, and keeps those that are fit to learn from."""

    def __init__(self, config: PolishConfig, target: Any, tokenizer: Tokenizer, group: Group) -> None:
        self._config, self._tokenizer, self._group = config, tokenizer, group
        self._compute = config.training.compute
        self._target = self._compute.place(target).eval()
        self.num_written = self.num_kept = 0

    def write(self, functions: Tokens) -> Tokens:
        """Returns a stream of functions that were kept, from the heads of `functions`."""
        kept: list[int] = []
        generator = torch.Generator(self._compute.device)
        generator.manual_seed(self._config.training.seed * self._group.size + self._group.rank)
        batches = list(self._batches(functions))
        total = sum(len(rows) for rows in batches)
        with Progress("functions", 0.0, self._group.is_first) as progress:
            for rows in batches:
                for text in self._continue(rows, generator):
                    kept.extend(text)
                progress.update(self.num_written / total, self.num_kept, None, len(kept), 0.0)
        return np.asarray(kept, dtype=functions.dtype)

    def _batches(self, functions: Tokens) -> Iterator[npt.NDArray[np.int64]]:
        config = self._config
        for heads in heads_by_length(functions, self._tokenizer, config.longest_head).values():
            rows = heads.repeat(config.samples, axis=0)
            for first in range(0, len(rows), config.most_rows):
                yield rows[first : first + config.most_rows]

    def _continue(self, heads: npt.NDArray[np.int64], generator: torch.Generator) -> Iterator[list[int]]:
        config = self._config
        rows = continue_together(
            self._target, heads, config.num_tokens, config.temperature, self._compute, self._group, generator
        )
        self.num_written += len(rows)
        for row in rows.tolist():
            text = keep(row[: heads.shape[1]], row[heads.shape[1] :], self._tokenizer)
            if text is not None:
                self.num_kept += 1
                yield text


def polish(config: PolishConfig, data: Path, target: Path, out: Path, group: Group) -> dict[str, Any] | None:
    """Runs one worker's part: lets the target in `target` write, and trains it on into `out`; goes on
    where an earlier run stopped. None where the slice ended first."""
    own, record = _own_functions(config, data, target, out, group)
    trainer = TargetTrainer(config.training, load_train(data), own, out, group)
    trainer.warm_start(target)
    trainer.resume()
    figures = trainer.train()
    if figures is not None:
        figures["own_functions"] = record
        if group.is_first:
            write_json(out / "training.json", figures)
    return figures


def _own_functions(
    config: PolishConfig, data: Path, target: Path, out: Path, group: Group
) -> tuple[Tokens, dict[str, int]]:
    from transformers import AutoModelForCausalLM

    from outrider.training.data.tokenizer import load_tokenizer

    path = out / "own.npz"
    if not path.is_file():
        model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32)
        writer = Writer(config, model, load_tokenizer(target), group)
        own = writer.write(load_functions(data))
        if group.is_first:
            out.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, own=own, written=writer.num_written, kept=writer.num_kept)
        return own, {"written": writer.num_written, "kept": writer.num_kept}
    with np.load(path) as saved:
        return saved["own"], {name: int(saved[name]) for name in ("written", "kept")}
