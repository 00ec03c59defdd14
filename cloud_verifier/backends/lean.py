"""Our decoder on a CPU, where Python and small operations count as much as products do for a small target.

It alone runs rows through some of the layers, and forwards whose rows enter above the first ones (`passes.partial`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from outrider.cloud_verifier.backends.attention.plan import Entry, ForwardPlan, PackedRows
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.layer_kernels import host_kernels
from outrider.cloud_verifier.backends.own import OwnDecoder, Turns, keep
from outrider.cloud_verifier.backends.weights import Weights
from outrider.kernels import plain_layers

if TYPE_CHECKING:
    from outrider.cloud_verifier.backends.passes.compiled import CompiledLayers


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute with the calling thread alone. Otherwise it wakes others for small operations too (exponentials
    of more than 2,048 numbers) and waits for them: on cores that are in use, for longer than the operation takes."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class LeanDecoder(OwnDecoder):
    """Implements `Decoder` for the models of `decoder_config`, in any dtype; on a GPU slowly."""

    writes_padding = False

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        """Raises `ModelError` for a tensor that `weights` lacks or that has another shape."""
        is_on_cpu = weights.device == "cpu"
        is_packed = is_on_cpu and weights.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        kernels = host_kernels(weights.dtype) if is_on_cpu else plain_layers
        super().__init__(config, weights, kernels, is_packed=is_packed)
        self._reader.load_own_kernel()
        self._compiled = self._compile()

    @property
    def most_own_rows(self) -> int:
        return self._reader.most_own_rows

    def _compile(self) -> CompiledLayers | None:
        """Returns what runs few rows through layers; None where our kernel multiplies none."""
        if not self.most_own_rows:
            return None
        from outrider.cloud_verifier.backends.passes.compiled import CompiledLayers  # needs numba

        return CompiledLayers(self._config, self._layers, self._rules, self._reader.own_kernel)

    def _run_layers(
        self, layers: Sequence[int], x: torch.Tensor, turns: Turns, plan: ForwardPlan
    ) -> torch.Tensor | None:
        compiled = self._compiled
        if compiled is None or not layers or not compiled.can_run(x, plan):
            return super()._run_layers(layers, x, turns, plan)
        plan.rules_seen.update((layer, self._rules[layer]) for layer in layers)
        return compiled(layers, x, turns, plan)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None, plan: ForwardPlan
    ) -> torch.Tensor:
        with self._threads(token_ids.shape[0]):
            first, x = 0, None
            if plan.entry is not None:
                first, x = plan.entry.num_layers, self._enter(plan.entry, plan, token_ids.shape[0])
            x = self.embed(token_ids) if x is None else x
            added = self._run(range(first, len(self._layers)), x, positions, plan)
            states = self._finish(x, added, plan)
            return self.score(states if rows is None else states[rows])

    def run_some(
        self, rows: PackedRows, layers: Sequence[int], num_first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SkipsLayers.run_some`."""
        with self._threads(rows.token_ids.shape[0]):
            x = self._run_through(layers[:num_first], rows)
            states = x.clone()
            added = self._run(layers[num_first:], x, rows.positions, rows.plan)
            return states, self.score(self._finish(x, added, rows.plan))

    def _threads(self, num_rows: int) -> AbstractContextManager[None]:
        """Returns within what so many rows are computed: by one thread where our kernel multiplies them."""
        return one_thread() if num_rows <= self.most_own_rows else contextlib.nullcontext()

    def _enter(self, entry: Entry, plan: ForwardPlan, num_rows: int) -> torch.Tensor:
        """Returns the states [num_rows, hidden_size] of all rows after the entry's layers; zeros where they pad. Of the
        features of these layers only those of the rows that were run are there."""
        below, size = entry.below, entry.states.shape[1]
        layers = {entry.num_layers - 1, *(each for each in plan.feature_layers if each < entry.num_layers)}
        low = {layer: entry.states.new_zeros((num_rows, size)) for layer in layers}
        every = low[entry.num_layers - 1]
        every[entry.known] = entry.states
        if below is not None:
            x = self._run_through(range(entry.num_layers), below)
            for layer, each in {**below.plan.features, entry.num_layers - 1: x}.items():
                low[layer][entry.others] = each[: below.plan.num_rows]
        plan.features.update(low)
        return every.clone()  # to which the other layers add

    def _run_through(self, layers: Sequence[int], rows: PackedRows) -> torch.Tensor:
        """Returns the states [num_rows, hidden_size] of rows after some of the first layers, and keeps their
        features."""
        x = self.embed(rows.token_ids)
        added = self._run(layers, x, rows.positions, rows.plan)
        if added is not None:
            keep(rows.plan, layers[-1], x.add_(added))
        return x
