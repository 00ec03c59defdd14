"""Few rows through layers of our decoder on a CPU, in one call of compiled code (`outrider.kernels.host.stack`).

Importing this module needs numba. The bits are those of `OwnDecoder`'s own loop, whose functions are called.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.attention.host import HostAttention, rule_numbers
from outrider.cloud_verifier.backends.attention.plan import AttentionRule, ForwardPlan
from outrider.cloud_verifier.backends.decoder_config import DecoderConfig
from outrider.cloud_verifier.backends.layers import Layer
from outrider.cloud_verifier.backends.own import Turns
from outrider.cloud_verifier.backends.products.packed import OwnKernel, PackedLinear
from outrider.kernels.host import stack
from outrider.kernels.host.threads import call_c
from outrider.kernels.host_layers import at, float_at


class CompiledLayers:
    """Runs rows through layers of a decoder. Not thread-safe."""

    def __init__(
        self, config: DecoderConfig, layers: Sequence[Layer], rules: Sequence[AttentionRule], own: OwnKernel
    ) -> None:
        """`own` multiplies: all layers' products are `PackedLinear`s."""
        self._own, self._layers = own, layers  # whose weights are as long there as their addresses are used
        heads = config.num_attention_heads, config.num_key_value_heads
        self._widths = {
            stack.ADDED: config.hidden_size,
            stack.NORMED: config.hidden_size,
            stack.QKV: (heads[0] + 2 * heads[1]) * config.head_dim,
            stack.ATTENDED: heads[0] * config.head_dim,
            stack.GATE_UP: 2 * config.intermediate_size,
            stack.GATED: config.intermediate_size,
        }
        self._rules = [rule_numbers(rule, config.head_dim) for rule in rules]
        self._table = np.zeros((len(layers), stack.NUM_FIELDS), np.int64)
        for fields, layer, rule, numbers in zip(self._table, layers, rules, self._rules, strict=True):
            _fill(fields, layer)
            fields[stack.WINDOW], fields[stack.RULE] = rule.window or 0, numbers.ctypes.data
        self._run = run = np.zeros(stack.SIZE, np.int64)
        run[stack.HIDDEN], run[stack.INNER], run[stack.HEAD_DIM] = (
            config.hidden_size, config.intermediate_size, config.head_dim,
        )  # fmt: skip
        run[stack.HEADS], run[stack.KV_HEADS] = heads
        run[stack.IS_GELU] = config.activation == "gelu_tanh"
        run[stack.EPSILON], run[stack.LAYERS] = float_at(config.rms_norm_eps), self._table.ctypes.data
        run[stack.ADD_NORM :] = stack.FUNCTIONS
        self._run_at = run.ctypes.data
        self._orders: dict[tuple[int, ...], NDArray[np.int64]] = {}  # of layers that were run
        self._room = torch.empty(0)

    def can_run(self, x: torch.Tensor, plan: ForwardPlan) -> bool:
        """Returns whether it runs states [rows, hidden_size] by this plan."""
        return (
            0 < len(x) == plan.num_rows <= self._own.most_rows
            and isinstance(plan.attention, HostAttention)
            and plan.key_pools[0].scales is None
        )

    def __call__(
        self, layers: Sequence[int], x: torch.Tensor, turns: Turns, plan: ForwardPlan
    ) -> torch.Tensor:
        """Does what `OwnDecoder._run_layers` does, for at least one layer. What it returns lasts until the next
        call."""
        attention, run = plan.attention, self._run
        assert isinstance(attention, HostAttention), "see `can_run`"
        self._use_layers(tuple(layers))
        self._use_pools(plan)
        added = self._use_room(len(x))
        self._keep_states(layers, x, plan)
        run[stack.NUM_LAYERS], run[stack.STATES] = len(layers), at(x)
        run[stack.COS], run[stack.SIN], run[stack.WRITTEN] = *map(at, turns), at(plan.write, torch.int64)
        run[stack.PARTS], run[stack.NUM_PARTS] = attention.parts.ctypes.data, len(attention.parts)
        run[stack.PLACES], run[stack.NUM_PLACES] = attention.slots.ctypes.data, attention.slots.size
        with self._own.helpers.lent() as pool_at:
            run[stack.POOL], run[stack.SHARES_ATTENTION] = pool_at, attention.is_shared
            call_c(stack.run_layers, self._run_at)
        return added

    def _use_layers(self, layers: tuple[int, ...]) -> None:
        if layers not in self._orders:
            self._orders[layers] = np.array(layers)
        self._run[stack.ORDER] = self._orders[layers].ctypes.data

    def _use_pools(self, plan: ForwardPlan) -> None:
        table, pools = self._table, (plan.key_pools, plan.value_pools)
        firsts = [at(each[0].rows) for each in pools]
        if firsts != table[0, [stack.KEYS, stack.VALUES]].tolist():
            for column, each in zip((stack.KEYS, stack.VALUES), pools, strict=True):
                table[:, column] = [at(pool.rows) for pool in each]
        self._run[stack.NUM_SLOTS] = plan.key_pools[0].num_slots

    def _use_room(self, num_rows: int) -> torch.Tensor:
        """Makes room for what is computed between, and returns where the last layer leaves what it adds."""
        total = num_rows * sum(self._widths.values())
        if total > self._room.numel():
            self._room = torch.empty(total)
        place = self._room.data_ptr()
        self._run[stack.NUM_ROWS] = num_rows
        for name, width in self._widths.items():
            self._run[name] = place
            place += 4 * num_rows * width
        hidden_size = self._widths[stack.ADDED]
        return self._room[: num_rows * hidden_size].view(num_rows, hidden_size)

    def _keep_states(self, layers: Sequence[int], x: torch.Tensor, plan: ForwardPlan) -> None:
        """Has those after these layers kept that the plan asks for, but for those after the last one."""
        self._table[:, stack.KEPT] = 0
        for layer in layers[:-1]:
            if layer in plan.feature_layers:
                plan.features[layer] = torch.empty_like(x)
                self._table[layer, stack.KEPT] = at(plan.features[layer])


def _fill(fields: NDArray[np.int64], layer: Layer) -> None:
    """Writes the addresses of a layer's weights."""
    norms = {
        stack.INPUT_NORM: layer.input_norm,
        stack.HEAD_NORMS: layer.head_norms,
        stack.ATTENTION_NORM: layer.attention_norm,
        stack.MLP_NORM: layer.mlp_norm,
        stack.DOWN_NORM: layer.down_norm,
    }
    for name, weight in norms.items():
        fields[name] = 0 if weight is None else at(weight)
    products = {
        stack.QKV_PRODUCT: layer.qkv,
        stack.OUTPUT_PRODUCT: layer.output,
        stack.GATE_UP_PRODUCT: layer.gate_up,
        stack.DOWN_PRODUCT: layer.down,
    }
    for name, product in products.items():
        assert isinstance(product, PackedLinear), "our kernel multiplies packed weights"
        fields[name : name + 4] = *product.addresses, product.num_outputs
