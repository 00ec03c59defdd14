"""Unlikelihood of repeats: a target that is trained on next tokens alone repeats itself when it decodes
greedily.

Welleck et al. 2020 (https://arxiv.org/abs/1908.04319, section 5.2): let the model write, and lower the
probability of each token that ends a run of tokens which the text already had. Here the texts are greedy and
the runs `RUN` long: shorter ones repeat in good code too.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.training.common.compute import Compute
from outrider.training.common.metrics import repeated_runs
from outrider.training.common.workers import Group
from outrider.training.data.streams import Batches
from outrider.training.draft.sampling import continue_together

RUN = 8


@dataclass(frozen=True)
class UnlikelihoodConfig:
    """Says how much text is written, and when it is learnt from."""

    start: float
    """Share of the budget from which the loss is added to the next-token loss of every step."""
    prompt: int = 64
    tokens: int = 192
    rows: int = 64
    """Texts written at a time."""
    step_rows: int = 8
    """Texts learnt from in a step; when all have been, the next are written."""
    weight: float = 1.0


class GreedyText:
    """Holds what the model in training writes itself, `step_rows` texts at a time, none twice.

    Args:
        places: where the prompts come from.
    """

    def __init__(self, config: UnlikelihoodConfig, places: Batches, group: Group) -> None:
        self._config, self._places, self._group = config, places, group
        self.rows: list[list[int]] = []
        """Texts that nothing has been learnt from yet: with `places`, the state."""

    def next(self, model: Any, compute: Compute) -> Tensor:
        """Returns this worker's texts of the step: [its share of step_rows, prompt + tokens] int64 on the
        device."""
        config = self._config
        if not self.rows:
            prompts = self._places.next(config.prompt, config.rows)[:, :-1]
            self.rows = continue_together(model, prompts, config.tokens, 0.0, compute, self._group).tolist()
        rows, self.rows = self.rows[: config.step_rows], self.rows[config.step_rows :]
        return compute.ids(np.asarray(rows[self._group.own(len(rows))]))


def repeats(rows: Tensor, first: int) -> Tensor:
    """Returns [rows, length - first] bool of [rows, length] ids: whether the run of `RUN` tokens that ends
    at each position from `first` on occurred earlier in the same row."""
    marks = [[False] * (RUN - 1) + repeated_runs(row, RUN) for row in rows.tolist()]
    return torch.tensor(marks, device=rows.device)[:, first:]


def repeat_loss(model: Any, compute: Compute, rows: Tensor, first: int) -> Tensor:
    """Returns -log(1 - p) of the tokens that end a repeat, summed, over the number of all from `first` on."""
    marks = repeats(rows, first).flatten()
    hidden = compute.last_hidden(model, rows[:, :-1]).view(rows.size(0), rows.size(1) - 1, -1)
    chosen = hidden[:, first - 1 :].flatten(0, 1)[marks]  # [num_marked, hidden_size]
    weight = model.get_output_embeddings().weight
    logits = (chosen @ weight.to(chosen.dtype).T).float()
    others = logits.scatter(-1, rows[:, first:].flatten()[marks][:, None], -torch.inf)
    total: Tensor = (logits.logsumexp(-1) - others.logsumexp(-1)).sum()
    return total / marks.numel()
