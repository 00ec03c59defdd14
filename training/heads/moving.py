"""The target as it was, and a copy that is trained: its layers and its norm move, its embeddings stay.

What comes out is another target, with a fingerprint and texts of its own.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.training.common.model import save_model
from outrider.training.draft.drafts import copy_tokenizer, load_target
from outrider.training.heads.frozen import FrozenTargetTrainer

TARGET_FOLDER = "target"


class MovingTargetTrainer(FrozenTargetTrainer):
    """Owns what trainers of a copy have in common: the copy, how far it moves, and where it is saved."""

    def _make_copy(self) -> Any:
        """Returns the target's weights in float32, of which layers and norm are trained."""
        copy = load_target(self.target_dir, torch.float32).train()
        copy.model.layers.requires_grad_(True)
        copy.model.norm.requires_grad_(True)
        self.divergences: list[float] = []  # of the whole copy from the target
        return copy

    def _note_divergence(self, divergence: Tensor) -> None:
        self.divergences.append(float(divergence.detach()))

    def _extra_state(self) -> dict[str, Any]:
        return {**super()._extra_state(), "divergences": self.divergences}

    def _take_extra_state(self, saved: dict[str, Any]) -> None:
        super()._take_extra_state(saved)
        self.divergences = saved["divergences"]

    def _save_copy(self, copy: Any) -> Path:
        """Saves the copy with its tokenizer, and returns its directory. Of the first process."""
        directory: Path = self.out / TARGET_FOLDER
        save_model(copy, directory)
        copy_tokenizer(self.target_dir, directory)
        return directory

    def _divergence_figures(self) -> dict[str, Any]:
        return {"divergence": float(np.mean(self.divergences[-50:] or [0.0]))}
