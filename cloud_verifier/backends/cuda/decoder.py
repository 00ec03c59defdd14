"""Our decoder on CUDA: a layer is ten launches, of which four are products, two attention's and four our kernels.

In Gemma 2 it is twelve. A product that the library splits takes one launch more. On a CPU the same is computed by
`outrider.kernels.plain_layers`, slowly.
"""

from __future__ import annotations

import torch

from outrider.cloud_verifier.backends.attention.plan import ForwardPlan
from outrider.cloud_verifier.backends.cuda.graphs import Capture, StepGraphs
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.layer_kernels import LayerKernels, device_kernels
from outrider.cloud_verifier.backends.own import OwnDecoder
from outrider.cloud_verifier.backends.products.ways import Linear
from outrider.cloud_verifier.backends.weights import Weights


class CudaDecoder(OwnDecoder):
    """Implements `Decoder` for the models of `decoder_config`, in any dtype."""

    writes_padding = True

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        kernels: LayerKernels | None = None,
        capture: Capture | None = None,
    ) -> None:
        """`kernels` are Triton's on CUDA and torch's on a CPU where they are None; with `capture` steps become graphs.
        Raises `ModelError` for a tensor that `weights` lacks or that has another shape."""
        super().__init__(config, weights, kernels or device_kernels(weights.device), is_packed=False)
        self._graphs = None if capture is None else StepGraphs(self.run_layers, capture)

    @property
    def num_graphs(self) -> int:
        """Returns the number of sizes of steps that are replayed as CUDA graphs."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def use_linear(self, linear: Linear) -> None:
        """Drops what was captured, too."""
        super().use_linear(linear)
        if self._graphs is not None:
            self._graphs.forget()

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        states = (self._graphs or self.run_layers)(token_ids, positions, plan)
        return self.score(states if rows is None else states[rows])

    def run_layers(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: ForwardPlan) -> torch.Tensor:
        """Returns the states after the last norm [num_rows, hidden_size], and writes the rows' keys and values."""
        x = self.embed(token_ids)
        return self._finish(x, self._run(range(len(self._layers)), x, positions, plan), plan)
