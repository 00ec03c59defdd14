"""Training an EAGLE-3 draft on a frozen target (Li et al. 2025, arXiv 2503.01840), with training-time test.

The layer reads pairs of the target's features and of the token after each, at all positions of a window at once. That
is the first step; in each further one it reads its own states of the step before, with the next true tokens, and
attends to what it would see in a draft: the pairs up to its own, and its chain of drafted tokens. Each step learns the
target's own distribution, by forward KL, weighted 0.8^step. The target's output embedding scores, which is frozen, so
that nothing of the size of the vocabulary is trained.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cloud_verifier.backends.decoder_config import DecoderConfig, make_decoder_config, with_defaults
from outrider.cloud_verifier.heads.eagle_modules import Eagle3, attention
from outrider.training.heads.directory import write_eagle
from outrider.training.heads.frozen import FrozenTargetConfig, FrozenTargetTrainer


@dataclass(frozen=True)
class EagleConfig(FrozenTargetConfig):
    """Holds everything that decides the run, beside the target and the data."""

    num_steps: int = 4
    feature_layers: tuple[int, ...] = ()
    """After which layers features are taken; the number of layers is after the final norm. Empty: a low one, the
    middle one and that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_steps < 1:
            raise ValueError(f"--steps {self.num_steps}: give at least 1")
        if any(phase.length <= self.num_steps + 1 for phase in self.phases):
            raise ValueError(f"--length: windows longer than the {self.num_steps} steps look ahead")


class EagleTrainer(FrozenTargetTrainer):
    """Trains one draft."""

    config: EagleConfig
    model: Eagle3

    def _make_model(self, config: EagleConfig, heads_dir: Path | None) -> Eagle3:
        if heads_dir is not None:
            raise ValueError(
                f"--heads {heads_dir}: an eagle draft begins anew; --resume goes on with one of --out"
            )
        num_layers = self.target.config.num_hidden_layers
        last = max(0, num_layers - 2)  # but one: of the last one's states only the norm is kept
        usual = min(1, last), min(num_layers // 2, last), num_layers
        self.feature_layers = config.feature_layers or usual
        if not all(0 <= layer <= num_layers and layer != num_layers - 1 for layer in self.feature_layers):
            raise ValueError(
                f"--feature-layers {' '.join(map(str, self.feature_layers))}: want some of 0 to {last}, and "
                f"{num_layers}, after the final norm"
            )
        self.layer_config = layer_config(self.target)
        size = self.layer_config.hidden_size
        draft = Eagle3(self.layer_config, len(self.feature_layers) * size)
        with torch.no_grad():  # begins with the last feature, as the target scores it
            draft.fc.weight.zero_()
            draft.fc.weight[:, -size:].fill_diagonal_(1.0)
            draft.layer.o_proj.weight.zero_()
            draft.layer.down_proj.weight.zero_()
            draft.norm.weight.copy_(self.target.model.norm.weight)
        return draft

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        features, hidden, embedded = self._features(ids[:, :-1])
        num_pairs = hidden.size(1) - self.config.num_steps
        every = torch.arange(hidden.size(0) * num_pairs)
        places = self._chosen(every).to(hidden.device)
        total, weights = hidden.new_zeros(()), 0.0
        for step, nexts in enumerate(self._steps(features[:, :num_pairs], embedded)):
            with self.compute.autocast():
                rows = self.model.scored(nexts.flatten(0, 1)[places])
            teacher = hidden[:, step + 1 :][:, :num_pairs].flatten(0, 1)[places]
            scale = self.config.decay**step
            total = total + scale * self._divergence(rows, teacher)
            weights += scale
        loss = total / weights
        return loss, loss.detach()

    def _steps(self, features: Tensor, embedded: Tensor) -> list[Tensor]:
        """Returns the states [rows, num_pairs, size] of each step."""
        num_pairs = features.size(1)
        positions, attend = torch.arange(num_pairs, device=features.device), StepAttention()
        found = []
        with self.compute.autocast():
            states = self.model.fuse(features)
            for step in range(self.config.num_steps):
                tokens = embedded[:, step + 1 :][:, :num_pairs]
                states = self.model(tokens, states, positions + step, attend)
                found.append(states)
        return found

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns of ids [rows, length] the features, the states after the final norm, and the embeddings, each
        [rows, length, its size]."""
        with self.compute.autocast():
            out = self.target.model(input_ids=inputs, use_cache=False, output_hidden_states=True)
        states: Any = out.hidden_states  # the embeddings first; the last is after the final norm
        hidden = states[-1].to(self.compute.dtype)
        taken = [states[min(layer + 1, len(states) - 1)] for layer in self.feature_layers]
        features = torch.cat(taken, dim=-1).to(hidden.dtype)
        return features, hidden, states[0].to(hidden.dtype)

    def _save_heads(self) -> dict[str, Any]:
        if self.group.is_first:
            write_eagle(self.model, self.layer_config, self.feature_layers, self.target_dir, self.out)
        return {}


class StepAttention:
    """Attends in each step over the pairs up to a position's own, and over its own of the steps before and of this."""

    def __init__(self) -> None:
        self._every: list[Tensor] = []  # of each step, keys and values [2, rows, kv_heads, n, head_dim]

    def __call__(self, query: Tensor, own: Tensor) -> Tensor:
        """See `eagle_modules.Attend`."""
        self._every.append(own)
        n = query.size(-2)
        own_only = torch.eye(n, dtype=torch.bool, device=query.device)
        seen = torch.cat([torch.ones_like(own_only).tril(), *[own_only] * (len(self._every) - 1)], dim=-1)
        return attention(query, torch.cat(self._every, dim=-2), seen)


def layer_config(target: Any) -> DecoderConfig:
    """Returns the configuration of a layer like the target's. Raises ValueError for one that is not computed here."""
    raw = {**target.config.to_dict(), "num_hidden_layers": 1}
    fields = with_defaults({"sliding_window": None, **raw, "model_type": "llama"})
    config = (
        None
        if fields is None
        else make_decoder_config({**fields, "attention_bias": False, "mlp_bias": False})
    )
    if config is None:
        raise ValueError(
            "--target: an EAGLE draft has a layer like the target's, and this target's is not known"
        )
    return config
