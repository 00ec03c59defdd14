"""Distil a draft from a finished target: forward KL on corpus text and on text the target wrote, INT4-aware
at the end.

    python -m training.distill --target DIR --data DIR --out DIR --minutes 20 [--resume]

The target's own text (sampled once, at the start) matters because the draft is used on such text, and a
small target writes unlike its corpus (DistillSpec, Zhou et al. 2024, section 4). From `quantize_start` on,
the forward pass uses the weights as the edge will have them (`training.quant`), and the saved weights are
the quantised ones.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.checkpoint import load_checkpoint, save_checkpoint, write_json
from training.data import Batches, Tokens, load_train
from training.loss import linear_cross_entropy, linear_distillation
from training.model import DRAFT, ModelConfig, create_model, num_params, save_model
from training.optim import Rates, make_optimizers, scale_rates, take_step
from training.progress import Progress
from training.quant import quantize_in_place, quantized_weights
from training.runtime import describe_machine, keep_freed_memory
from training.sampling import continue_rows
from training.schedule import Phase, Schedule, phase_at


@dataclass(frozen=True)
class DistillConfig:
    """Everything that decides the run, beside the target and the data."""

    model: ModelConfig = DRAFT
    minutes: float = 20.0
    phases: tuple[Phase, ...] = (
        Phase(0.0, length=256, rows=8, num_layers=2),
        Phase(0.9, 1024, 2, num_layers=2),
    )
    schedule: Schedule = field(default_factory=lambda: Schedule(decay_start=0.5))
    rates: Rates = field(default_factory=lambda: Rates(muon=0.02, embed=0.004))
    clip_norm: float = 1.0
    ce_weight: float = 0.0
    """Weight of plain cross-entropy on corpus text. The target's distribution says more than one token of
    it does.
    """
    quantize_start: float = 0.7
    """Share of the budget from which the weights are INT4 in the forward pass."""
    sampling_share: float = 0.12
    """Share of the budget spent on sampling the target's text."""
    sampled_share: float = 0.35
    """Share of the batches that are the target's text."""
    sample_rows: int = 64
    sample_prompt: int = 32
    sample_tokens: int = 256
    sample_temperature: float = 0.9
    checkpoint_minutes: float = 4.0
    seed: int = 1
    num_threads: int = 2


@dataclass
class DistillState:
    """Position in the run."""

    elapsed_s: float = 0.0
    step: int = 0
    tokens: int = 0


class Distiller:
    """Owns both models, the draft's optimisers, the target's sampled text and the position in the run."""

    def __init__(self, config: DistillConfig, target_dir: Path, stream: Tokens, out: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(config.seed)
        torch.set_num_threads(config.num_threads)
        self.config, self.out, self.state = config, out, DistillState()
        self.target = AutoModelForCausalLM.from_pretrained(str(target_dir), dtype=torch.float32).eval()
        if self.target.config.vocab_size != config.model.vocab_size:
            raise ValueError(
                f"{target_dir} has {self.target.config.vocab_size} ids, the draft {config.model.vocab_size}"
            )
        self.target.requires_grad_(False)
        self.draft = create_model(config.model)
        _inherit_embedding(self.draft, self.target)
        self.optimizers = make_optimizers(self.draft, config.rates)
        self.corpus = Batches(stream, seed=config.seed, epoch=1)
        self.sampled: Batches | None = None
        self.rng = np.random.default_rng(config.seed)
        self.history: list[dict[str, float]] = []

    def train(self) -> dict[str, Any]:
        """Run to the end of the budget, save the quantised draft and return the figures of the run."""
        budget_s = self.config.minutes * 60
        with Progress("draft", budget_s, self.state.elapsed_s) as progress:
            if self.sampled is None:
                self._sample_target(budget_s * self.config.sampling_share, progress)
                self._save()
            saved_at = time.monotonic()
            while self.state.elapsed_s < budget_s:
                started = time.monotonic()
                num_tokens, loss = self._step(self.state.elapsed_s / budget_s)
                duration = time.monotonic() - started
                self.state.elapsed_s += duration
                self.state.step += 1
                self.state.tokens += num_tokens
                progress.update(
                    self.state.elapsed_s, self.state.step, loss, self.state.tokens, num_tokens / duration
                )
                self.history.append(
                    {"tokens": self.state.tokens, "elapsed_s": self.state.elapsed_s, "loss": loss}
                )
                if time.monotonic() - saved_at > self.config.checkpoint_minutes * 60:
                    self._save()
                    saved_at = time.monotonic()
        return self._finish()

    def resume(self) -> bool:
        """Go on from the checkpoint in the output directory; False if there is none."""
        saved = load_checkpoint(self.out / "checkpoint.pt")
        if saved is None:
            return False
        self.state = DistillState(**saved["state"])
        self.draft.load_state_dict(saved["draft"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.corpus.epoch, self.corpus.cursor = saved["corpus"]
        stream = saved["sampled"].numpy().astype(np.uint16)
        self.sampled = Batches(stream, self.config.seed, *saved["sampled_at"])
        self.rng = np.random.default_rng([self.config.seed, self.state.step])
        self.history = saved["history"]
        return True

    def _sample_target(self, budget_s: float, progress: Progress) -> None:
        """Let the target go on from random places of the corpus, for `budget_s` seconds and one batch at
        least.
        """
        config, generator = self.config, torch.Generator().manual_seed(self.config.seed)
        rows: list[Tensor] = []
        started, num_tokens = time.monotonic(), 0
        while not rows or time.monotonic() - started < budget_s:
            prompts = torch.from_numpy(self.corpus.next(config.sample_prompt, config.sample_rows)[:, :-1])
            rows.append(
                continue_rows(
                    self.target, prompts, config.sample_tokens, config.sample_temperature, generator
                )
            )
            num_tokens += rows[-1].numel()
            elapsed = time.monotonic() - started
            progress.update(self.state.elapsed_s + elapsed, 0, None, num_tokens, num_tokens / elapsed)
        self.state.elapsed_s += time.monotonic() - started
        self.sampled = Batches(torch.cat(rows).flatten().numpy().astype(np.uint16), seed=config.seed)

    def _step(self, done: float) -> tuple[int, float]:
        """One optimiser step: tokens seen, and KL(target ‖ draft) before it."""
        assert self.sampled is not None, "the target's text is sampled before the first step"
        config, phase = self.config, phase_at(self.config.phases, done)
        scale_rates(self.optimizers, config.schedule.scale(done))
        is_sampled = self.rng.random() < config.sampled_share
        batch = torch.from_numpy((self.sampled if is_sampled else self.corpus).next(phase.length, phase.rows))
        inputs = {"input_ids": batch[:, :-1], "use_cache": False}
        with torch.no_grad():
            target_hidden = self.target.model(**inputs).last_hidden_state.flatten(0, 1)
        weights = quantized_weights(self.draft) if done >= config.quantize_start else {}
        hidden = torch.func.functional_call(
            self.draft.model, weights, kwargs=inputs
        ).last_hidden_state.flatten(0, 1)
        head = weights.get("embed_tokens.weight", self.draft.model.embed_tokens.weight)
        divergence = linear_distillation(
            hidden, head, target_hidden, self.target.get_output_embeddings().weight
        )
        loss = divergence
        if config.ce_weight and not is_sampled:
            loss = loss + config.ce_weight * linear_cross_entropy(hidden, head, batch[:, 1:].flatten())[0]
        torch.autograd.backward(loss)
        take_step(self.draft, self.optimizers, config.clip_norm)
        return batch[:, 1:].numel(), float(divergence.detach())

    def _save(self) -> None:
        assert self.sampled is not None, "nothing to save before the target's text is sampled"
        save_checkpoint(
            self.out / "checkpoint.pt",
            {
                "state": asdict(self.state),
                "draft": self.draft.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "corpus": (self.corpus.epoch, self.corpus.cursor),
                "sampled": torch.from_numpy(self.sampled.stream.astype(np.int32)),
                "sampled_at": (self.sampled.epoch, self.sampled.cursor),
                "history": self.history,
            },
        )

    def _finish(self) -> dict[str, Any]:
        assert self.sampled is not None, "a finished run has sampled"
        self._save()
        quantize_in_place(self.draft)
        save_model(self.draft, self.out, torch.float32)
        figures = {
            "machine": describe_machine(),
            "num_params": num_params(self.draft),
            "tokens": self.state.tokens,
            "sampled_tokens": len(self.sampled.stream),
            "steps": self.state.step,
            "minutes": round(self.state.elapsed_s / 60, 1),
            "loss": float(np.mean([entry["loss"] for entry in self.history[-50:]])),
            "config": asdict(self.config),
            "history": self.history[:: max(1, len(self.history) // 100)],
        }
        write_json(self.out / "training.json", figures)
        return figures


@torch.no_grad()
def _inherit_embedding(draft: Any, target: Any) -> None:
    """Start the draft's embedding at the principal components of the target's output embedding."""
    weight = target.get_output_embeddings().weight  # [vocab, target_size]
    size = draft.config.hidden_size
    if weight.size(1) < size:
        return
    _, _, directions = torch.linalg.svd(weight, full_matrices=False)
    components = weight @ directions[:size].T  # [vocab, draft_size]
    draft.model.embed_tokens.weight.copy_(components)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.distill", description="Distil a draft from a target."
    )
    parser.add_argument("--target", type=Path, default=Path("models/embedded/target"))
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("training/runs/pair/draft"))
    parser.add_argument("--minutes", type=float, default=DistillConfig.minutes)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--threads", type=int, default=DistillConfig.num_threads)
    args = parser.parse_args()
    keep_freed_memory()
    config = DistillConfig(minutes=args.minutes, num_threads=args.threads)
    distiller = Distiller(config, args.target, load_train(args.data), args.out)
    if args.resume and not distiller.resume():
        print(f"no checkpoint in {args.out}: starting from scratch")
    figures = distiller.train()
    print(f"draft: {figures['tokens'] / 1e6:.2f} M tokens, KL {figures['loss']:.3f} nats a token")


if __name__ == "__main__":
    main()
