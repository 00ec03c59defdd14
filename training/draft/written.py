"""Text that models write from beginnings in a corpus, to learn from."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.training.common.compute import Compute
from outrider.training.common.trainer import RunConfig
from outrider.training.common.workers import Group
from outrider.training.data.streams import Batches, Tokens
from outrider.training.draft.sampling import continue_together


@dataclass(frozen=True)
class WritingConfig(RunConfig):
    """Holds what decides a run that learns from text of the corpus and of the target."""

    target_share: float = 0.35
    """Share of the batches that are text the target wrote, all of it before the first step."""
    target_text_tokens: int = 131_072
    sample_rows: int = 64
    sample_prompt: int = 32
    sample_tokens: int = 256
    sample_temperature: float = 0.9


class Writer:
    """Lets models go on from random places of a corpus."""

    def __init__(
        self, config: WritingConfig, corpus: Batches, num_ids: int, compute: Compute, group: Group
    ) -> None:
        self._config, self._corpus, self._num_ids = config, corpus, num_ids
        self._compute, self._group = compute, group

    def write(self, model: Any, *key: int) -> Tensor:
        """Returns [sample_rows, prompt + tokens] int32 on the CPU; `key` keeps one call's draws from another's."""
        config, group = self._config, self._group
        prompts = self._corpus.next(config.sample_prompt, config.sample_rows)[:, :-1]
        seed = np.random.SeedSequence([config.seed, *key, group.rank])
        generator = torch.Generator(self._compute.device)
        generator.manual_seed(int(seed.generate_state(1)[0]))
        return continue_together(
            model,
            prompts,
            config.sample_tokens,
            config.sample_temperature,
            self._compute,
            group,
            generator,
            self._num_ids,
        )


class TargetText:
    """Holds what the target wrote before the first step, and batches of it."""

    def __init__(self, config: WritingConfig, writer: Writer, target: Any) -> None:
        self._config, self._writer, self._target = config, writer, target
        self.rows: list[Tensor] = []  # [rows, prompt + tokens] each, int32 on the CPU
        self._batches: Batches | None = None

    @property
    def num_tokens(self) -> int:
        """Returns how much there is, beginnings included."""
        return sum(rows.numel() for rows in self.rows)

    @property
    def is_short(self) -> bool:
        """Returns whether the target has written less than `target_text_tokens`, where it is asked to."""
        return self._config.target_share > 0 and self.num_tokens < self._config.target_text_tokens

    def write(self, step: int) -> int:
        """Lets the target write one batch more; returns its tokens."""
        self.rows.append(self._writer.write(self._target, step, len(self.rows)))
        self._batches = None
        return self.rows[-1].numel()

    def next(self, length: int, rows: int) -> npt.NDArray[np.int64]:
        """Returns the next batch, [rows, length + 1] ids."""
        if self._batches is None:
            self._batches = Batches(as_stream(torch.cat(self.rows)), seed=self._config.seed)
        return self._batches.next(length, rows)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""
        at = None if self._batches is None else (self._batches.epoch, self._batches.cursor)
        return {"target_rows": self.rows, "target_text_at": at}

    def take_state(self, saved: dict[str, Any]) -> None:
        """Restores it."""
        self.rows = saved["target_rows"]
        if saved["target_text_at"] is not None:
            stream = as_stream(torch.cat(self.rows))
            self._batches = Batches(stream, self._config.seed, *saved["target_text_at"])


def as_stream(rows: Tensor) -> Tokens:
    """Returns rows of ids one after the other."""
    return rows.flatten().numpy().astype(np.uint32)
