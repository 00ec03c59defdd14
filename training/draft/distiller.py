"""Distilling a draft from a finished target: on corpus text, on text the target wrote and on text the draft
wrote; INT4-aware at the end.

DistillSpec (Zhou et al. 2024, https://arxiv.org/abs/2310.08461) compares the divergences and shows why a
draft should learn on its own text; `easy_share` is the selection of AdaSPEC (Hu et al. 2025,
https://arxiv.org/abs/2510.19779). From `quantize_start` on, the forward pass uses the weights as the edge
will have them (`outrider.training.draft.quant`), and the saved weights are the quantised ones.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.training.common.loss import DIVERGENCES, linear_divergence, row_divergence
from outrider.training.common.model import DRAFT, ModelConfig, save_model
from outrider.training.common.optim import Rates
from outrider.training.common.schedule import Phase, Schedule
from outrider.training.common.trainer import Trainer
from outrider.training.common.workers import SOLO, Group
from outrider.training.data.streams import Batches, Tokens
from outrider.training.draft.drafts import (
    copy_tokenizer,
    create_draft,
    load_draft,
    load_target,
    num_common_ids,
)
from outrider.training.draft.quant import head_weight, quantize_in_place, quantized, quantized_weights
from outrider.training.draft.written import TargetText, Writer, WritingConfig, as_stream


@dataclass(frozen=True)
class DistillConfig(WritingConfig):
    """Holds everything that decides the run, beside the target and the data."""

    model: ModelConfig = DRAFT
    minutes: float = 20.0
    phases: tuple[Phase, ...] = (Phase(0.0, length=256, rows=8), Phase(0.9, length=1024, rows=2))
    schedule: Schedule = field(default_factory=lambda: Schedule(decay_start=0.5))
    rates: Rates = field(default_factory=lambda: Rates(muon=0.02, embed=0.004))
    divergence: str = "fkl"
    """A key of `outrider.training.common.loss.DIVERGENCES`."""
    draft_share: float = 0.0
    """Share of the batches that are text the draft wrote, anew every `refresh_steps`."""
    refresh_steps: int = 64
    easy_share: float = 1.0
    """Share of each batch's positions that is learnt: those where the draft is worst compared with a
    reference draft, which has shown that they can be learnt.
    """
    quantize_start: float = 0.7
    """Share of the budget from which the weights are INT4 in the forward pass."""
    seed: int = 1

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"--divergence {self.divergence}: choose from {', '.join(DIVERGENCES)}")
        if min(self.target_share, self.draft_share) < 0 or self.target_share + self.draft_share > 1:
            raise ValueError("--target-share and --draft-share must be at least 0 and together at most 1")
        if not 0 < self.easy_share <= 1:
            raise ValueError(f"--easy-share {self.easy_share}: give a share above 0 and at most 1")


PRESETS = {
    "cpu": DistillConfig(target_share=0.7, target_text_tokens=393_216, sample_rows=128),
    "gpu": DistillConfig(
        tokens=300_000_000,
        phases=(Phase(0.0, length=512, rows=128), Phase(0.9, length=1024, rows=64)),
        micro_tokens=65_536,
        target_share=0.7,
        target_text_tokens=20_000_000,
        sample_rows=2048,
    ),
}
"""For the embedded pair, by where it is made."""


class Distiller(Trainer):
    """Owns both models and the texts they wrote.

    Args:
        draft_dir: a saved draft to train on; None for a new one of `config.model`'s shape.
        reference_dir: a draft distilled before, for `easy_share` below 1.
    """

    name = "draft"
    config: DistillConfig

    def __init__(
        self,
        config: DistillConfig,
        target_dir: Path,
        stream: Tokens,
        out: Path,
        group: Group = SOLO,
        *,
        draft_dir: Path | None = None,
        reference_dir: Path | None = None,
    ) -> None:
        if (config.easy_share < 1) != (reference_dir is not None):
            raise ValueError("--easy-share below 1 and --reference belong together")
        torch.manual_seed(config.seed)
        self.target_dir = target_dir
        self.target = config.compute.place(load_target(target_dir, config.compute.dtype))
        draft = (
            create_draft(config.model, self.target)
            if draft_dir is None
            else load_draft(draft_dir, target_dir)
        )
        super().__init__(config, draft, out, group)
        if draft_dir is not None:
            self._begin_after(draft_dir / "training.json")
        self.num_ids = num_common_ids(target_dir, self.target, self.model)
        self.reference = None
        if reference_dir is not None:
            self.reference = self.compute.place(load_draft(reference_dir, target_dir).requires_grad_(False))
        self.corpus = Batches(stream, seed=config.seed, epoch=1)
        self.writer = Writer(config, self.corpus, self.num_ids, self.compute, group)
        self.target_text = TargetText(config, self.writer, self.target)
        self.draft_text: Batches | None = None
        self.draft_text_step = -1

    def _prepare(self) -> int:
        if self.target_text.is_short:
            return self.target_text.write(self.state.step)
        if self.config.draft_share and self._is_draft_text_old():
            return self._sample_draft_text()
        return 0

    def _is_draft_text_old(self) -> bool:
        return self.draft_text is None or self.state.step - self.draft_text_step >= self.config.refresh_steps

    def _sample_draft_text(self) -> int:
        is_quantized = self.done >= self.config.quantize_start
        with quantized(self.model) if is_quantized else nullcontext():
            rows = self.writer.write(self.model, self.state.step, len(self.target_text.rows))
        self.draft_text = Batches(as_stream(rows), seed=self.config.seed)
        self.draft_text_step = self.state.step
        return rows.numel()

    def _batch(self, phase: Phase) -> npt.NDArray[np.int64]:
        return self._source(self._draw()).next(phase.length, phase.rows)

    def _source(self, draw: float) -> Batches | TargetText:
        if draw < self.config.target_share:
            return self.target_text
        if draw < self.config.target_share + self.config.draft_share:
            assert self.draft_text is not None, "the draft's text is sampled before a step"
            return self.draft_text
        return self.corpus

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        inputs = ids[:, :-1]
        weights = quantized_weights(self.model) if done >= self.config.quantize_start else {}
        target_hidden = self._target_hidden(inputs)
        target_head = self.target.get_output_embeddings().weight[: self.num_ids]
        hidden = self.compute.last_hidden(self.model, inputs, weights)
        head = head_weight(self.model, weights)[: self.num_ids]
        if self.reference is not None:
            rows = self._easiest(inputs, hidden, head, target_hidden, target_head)
            hidden, target_hidden = hidden[rows], target_hidden[rows]
        loss = linear_divergence(self.config.divergence, hidden, head, target_hidden, target_head)
        return loss, loss.detach()

    @torch.no_grad()
    def _target_hidden(self, inputs: Tensor) -> Tensor:
        return self.compute.last_hidden(self.target, inputs)

    @torch.no_grad()
    def _easiest(
        self, inputs: Tensor, hidden: Tensor, head: Tensor, target_hidden: Tensor, target_head: Tensor
    ) -> Tensor:
        """Returns the rows to learn from: the `easy_share` of largest draft loss less reference loss."""
        kind = self.config.divergence
        reference_hidden = self.compute.last_hidden(self.reference, inputs)
        assert self.reference is not None, "asked for with a reference only"
        reference_head = self.reference.get_output_embeddings().weight[: self.num_ids]
        gain = row_divergence(kind, hidden, head, target_hidden, target_head)
        gain -= row_divergence(kind, reference_hidden, reference_head, target_hidden, target_head)
        return gain.topk(max(1, round(len(gain) * self.config.easy_share))).indices

    def _extra_state(self) -> dict[str, Any]:
        return {
            "corpus": (self.corpus.epoch, self.corpus.cursor),
            **self.target_text.state(),
        }

    def _take_extra_state(self, saved: dict[str, Any]) -> None:
        """Restores it but for the draft's own text, which is sampled anew."""
        self.corpus.epoch, self.corpus.cursor = saved["corpus"]
        self.target_text.take_state(saved)

    def _finish(self) -> dict[str, Any]:
        quantize_in_place(self.model)
        if self.group.is_first:
            save_model(self.model, self.out, torch.float32)
            copy_tokenizer(self.target_dir, self.out)
        return {
            "sampled_tokens": self.target_text.num_tokens,
            "loss": float(np.mean([entry["loss"] for entry in self.history[-50:]])),
        }
