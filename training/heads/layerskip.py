"""Training a target whose first layers draft for it: LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710, section 4).

The target trains on from its weights. Layers are dropped at random, later ones more often and more often as the run
goes on, so that the others lean on them less; and the states after earlier layers learn to be scored by the target's
own norm and output embedding. The exit that will draft learns in every step, the others take turns (the paper's
rotation), with its weights, which grow with depth. Teacher of all is the target as it was, whose text is learnt from;
the embeddings stay. What comes out is another target, with a fingerprint and texts of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.training.common.optim import make_optimizers
from outrider.training.heads.directory import write_early_exit
from outrider.training.heads.frozen import FrozenTargetConfig
from outrider.training.heads.moving import MovingTargetTrainer


@dataclass(frozen=True)
class LayerSkipConfig(FrozenTargetConfig):
    """Holds everything that decides the run, beside the target and the data."""

    exit_layer: int = 2
    """Layers that draft: the first so many."""
    layer_dropout: float = 0.1
    """How often the last layer is left out at the end of the run."""
    exit_weight: float = 1.0
    """Of the loss of the exit that drafts, beside the target's own."""
    exit_scale: float = 0.2
    """Of the other exits' weights (the paper's e_scale); 0: they do not learn."""
    target_rates: float = 0.25
    """Factor on the learning rates, which are those of new heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.layer_dropout < 1:
            raise ValueError(f"--layer-dropout {self.layer_dropout}: give a share from 0 and below 1")
        if self.exit_weight <= 0 or self.target_rates <= 0 or self.exit_scale < 0:
            raise ValueError("--exit-weight and --target-rates must be above 0, --exit-scale not below")

    def dropout(self, layer: int, num_layers: int, done: float) -> float:
        """Returns how often a layer is left out: rising exponentially over depth from 0, and over the run (D and S in
        section 4.1)."""
        depth: float = 2 ** (layer / max(1, num_layers - 1)) - 1
        return self.layer_dropout * depth * (2**done - 1)

    def exits(self, num_layers: int, step: int) -> dict[int, float]:
        """Returns the weight of each exit that learns in a step, by its number of layers: `exit_layer`, and one of the
        others in turn, weighted by the sum of the layers' numbers up to it (e in section 4.2)."""
        found = {self.exit_layer: self.exit_weight}
        others = [each for each in range(1, num_layers) if each != self.exit_layer]
        if others and self.exit_scale:
            turn = others[step % len(others)]
            found[turn] = self.exit_scale * turn * (turn + 1) / (num_layers * (num_layers - 1))
        return found


class LayerSkipTrainer(MovingTargetTrainer):
    """Trains the copy's first layers to draft for it."""

    config: LayerSkipConfig

    def _make_model(self, config: LayerSkipConfig, heads_dir: Path | None) -> Any:
        if heads_dir is not None:
            raise ValueError(f"--heads {heads_dir}: an early exit has no heads; --resume goes on with --out")
        num_layers = self.target.config.num_hidden_layers
        if not 1 <= config.exit_layer < num_layers:
            raise ValueError(f"--exit-layer {config.exit_layer}: want 1 to {num_layers - 1} of {num_layers}")
        return self._make_copy()

    def _take_model(self, model: Any) -> None:
        config = self.config
        self.model = self.compute.place(model)
        self.layers = WatchedLayers(self.model.model.layers)
        self.optimizers = make_optimizers(model, config.rates.times(config.target_rates), self.group)

    def _loss(self, ids: Tensor, done: float) -> tuple[Tensor, Tensor]:
        config, num_layers, inputs = self.config, len(self.model.model.layers), ids[:, :-1]
        places = self._chosen(torch.arange(inputs.numel())).to(inputs.device)
        with torch.no_grad():
            teacher = self.compute.last_hidden(self.target, inputs)[places]
        exits = config.exits(num_layers, self.state.step)
        rates = [config.dropout(layer, num_layers, done) for layer in range(num_layers)]
        rng = np.random.default_rng([config.seed, self.state.step, self.group.rank, num_layers])
        self.layers.watch(exits, rates, rng, len(inputs))
        hidden = self.compute.last_hidden(self.model, inputs)[places]
        own = self._divergence(hidden, teacher)
        loss, figure = own, own
        for exit_layer, weight in exits.items():
            with self.compute.autocast():
                states = self.model.model.norm(self.layers.states[exit_layer].flatten(0, 1)[places])
            divergence = self._divergence(states, teacher)
            loss = loss + weight * divergence
            if exit_layer == config.exit_layer:
                figure = divergence
        self.layers.states.clear()
        self._note_divergence(own)
        return loss, figure.detach()

    def _save_heads(self) -> dict[str, Any]:
        if self.group.is_first:
            write_early_exit(range(self.config.exit_layer), self._save_copy(self.model), self.out)
        return self._divergence_figures()


class WatchedLayers:
    """Keeps the states after some layers of a forward, and leaves layers out of rows of it."""

    def __init__(self, layers: Any) -> None:
        self.states: dict[int, Tensor] = {}  # by number of layers, each [rows, length, size]
        self._wanted: frozenset[int] = frozenset()
        self._is_dropped = np.zeros((len(layers), 0), bool)
        for index, layer in enumerate(layers):
            layer.register_forward_hook(self._hook(index), with_kwargs=True)

    def watch(self, wanted: Any, rates: list[float], rng: np.random.Generator, num_rows: int) -> None:
        """Says what the next forward keeps, and how often each layer is left out of a row."""
        self._wanted = frozenset(wanted)
        self._is_dropped = rng.random((len(rates), num_rows)) < np.array(rates)[:, None]

    def _hook(self, index: int) -> Any:
        def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: Tensor) -> Tensor:
            before: Tensor = args[0] if args else kwargs["hidden_states"]
            if self._is_dropped[index].any():
                is_dropped = torch.from_numpy(self._is_dropped[index]).to(after.device)
                after = torch.where(is_dropped[:, None, None], before, after)
            if index + 1 in self._wanted:
                self.states[index + 1] = after
            return after

        return hook
