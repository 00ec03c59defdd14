"""Sets where and in which precision a model is trained: float32 on a CPU, bfloat16 autocast on CUDA and on request."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Compute:
    """Describes a device and how models run on it. Weights and optimiser states are float32 on both."""

    device: str = "cpu"
    is_compiled: bool = False
    is_bfloat16: bool = False
    """On a CPU too: products were 4 to 5 times as fast on one with AVX512_BF16, and are slower on one without."""

    def __post_init__(self) -> None:
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"--device {self.device}: torch sees no CUDA device; use --device cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the matrix products and the residual stream."""
        is_bfloat16 = self.is_bfloat16 or self.device.startswith("cuda")
        return torch.bfloat16 if is_bfloat16 else torch.float32

    def place(self, model: Any) -> Any:
        """Move a decoder to the device and, where asked, compile its layers (alike, so it is done once)."""
        model.to(self.device)
        if self.dtype != torch.float32 and not hasattr(model, "residual_dtype"):
            model.residual_dtype = self.dtype
            model.get_input_embeddings().register_forward_hook(_to_bfloat16)
        if self.is_compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """Runs matrix products in `dtype`."""
        kind = self.device.split(":")[0]
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.dtype != torch.float32)

    def ids(self, batch: npt.NDArray[np.int64]) -> Tensor:
        """Returns token ids on the device, int64."""
        ids = torch.from_numpy(batch)
        return ids if self.device == "cpu" else ids.pin_memory().to(self.device, non_blocking=True)

    def last_hidden(self, model: Any, ids: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Runs [rows, length] ids → [rows * length, hidden_size] in `dtype`, before the output embedding.
        `weights` (names below `model.model`) stand in for the model's own.

        `weights` (names below `model.model`) stand in for the model's own.
        """
        inputs = {"input_ids": ids, "use_cache": False}
        with self.autocast():
            out = torch.func.functional_call(model.model, weights or {}, kwargs=inputs)
        hidden: Tensor = out.last_hidden_state.flatten(0, 1).to(self.dtype)
        return hidden


def _to_bfloat16(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
    return embedded.to(torch.bfloat16)
