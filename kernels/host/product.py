"""The product of some rows with a matrix, by one thread and as fast as memory is read, with a library's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from outrider.kernels.host.compiler import jit

SPAN = 1024  # inputs that are summed by themselves, as oneDNN does
PANEL = 16  # outputs whose weights lie together
TILE = 6  # rows that share what is read of a panel: their sums are in 12 of AVX2's 16 registers
_LANES = 8  # of a register
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_INDEX = ir.IntType(64)
_MATRIX = types.float32[:, ::1]
_PANELS = types.float32[:, :, ::1]


def to_panels(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns a weight [out, in] in panels [⌈out / PANEL⌉, in, PANEL], as `multiply_rows` reads it."""
    num_outputs, num_inputs = weight.shape
    panels = np.empty((-(-num_outputs // PANEL), num_inputs, PANEL), np.float32)
    _fill_panels(weight, panels)
    return panels


@jit(types.void(_MATRIX, _PANELS))
def _fill_panels(weight: Any, panels: Any) -> None:
    """Writes a weight to panels, the last with zeros where it ends."""
    num_outputs, num_inputs = weight.shape
    for panel in range(panels.shape[0]):
        first = panel * PANEL
        mine = panels[panel]
        for i in range(num_inputs):
            for j in range(PANEL):
                mine[i, j] = weight[first + j, i] if first + j < num_outputs else 0


@intrinsic  # type: ignore[untyped-decorator]
def _sum_products(
    _: Any, rows: Any, first: Any, count: Any, panels: Any, panel: Any, start: Any, stop: Any, sums: Any
) -> Any:
    """Writes rows[first : first + count, start:stop] · panels[panel, start:stop] to sums[:count].

    `count` is 1 to `TILE`, and for each there is a loop whose sums stay in registers; numba's arrays would not.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays = [
            context.make_array(signature.args[place])(context, builder, values[place]) for place in (0, 3, 7)
        ]
        done = builder.append_basic_block("done")
        choice = builder.switch(values[2], done)
        for num_rows in range(1, TILE + 1):
            block = builder.append_basic_block(f"rows_{num_rows}")
            choice.add_case(values[2].type(num_rows), block)
            builder.position_at_end(block)
            _add_loop(builder, arrays, num_rows, values[1], *values[4:7])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(rows, first, count, panels, panel, start, stop, sums), generate


def _add_loop(
    builder: Any, arrays: Any, num_rows: int, first: Any, panel: Any, start: Any, stop: Any
) -> None:
    """Adds the loop over inputs for so many rows."""
    rows, panels, sums = arrays
    num_inputs = builder.extract_value(rows.shape, 1)
    weights = builder.gep(panels.data, [builder.mul(builder.mul(panel, num_inputs), _INDEX(PANEL))])
    inputs = [
        builder.gep(rows.data, [builder.mul(builder.add(first, _INDEX(row)), num_inputs)])
        for row in range(num_rows)
    ]
    name = f"llvm.fmuladd.v{_LANES}f32"
    multiply_and_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), name
    )
    begin, loop, end = builder.block, builder.append_basic_block("input"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    i = builder.phi(_INDEX)
    i.add_incoming(start, begin)
    before = [builder.phi(_VECTOR) for _ in range(num_rows * PANEL // _LANES)]  # row by row
    place = builder.mul(i, _INDEX(PANEL))
    factors = [
        builder.load(_vector_at(builder, weights, builder.add(place, _INDEX(lane))), align=4)
        for lane in range(0, PANEL, _LANES)
    ]
    repeated = [_repeated(builder, builder.load(builder.gep(mine, [i]))) for mine in inputs]
    pairs = [(x, factor) for x in repeated for factor in factors]
    after = [
        builder.call(multiply_and_add, [*pair, total]) for pair, total in zip(pairs, before, strict=True)
    ]
    following = builder.add(i, _INDEX(1))
    i.add_incoming(following, loop)
    for old, new in zip(before, after, strict=True):
        old.add_incoming(ir.Constant(_VECTOR, [0.0] * _LANES), begin)
        old.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, stop), loop, end)

    builder.position_at_end(end)
    for number, total in enumerate(after):
        builder.store(total, _vector_at(builder, sums.data, _INDEX(number * _LANES)), align=4)


def _vector_at(builder: Any, data: Any, index: Any) -> Any:
    return builder.bitcast(builder.gep(data, [index]), _VECTOR.as_pointer())


def _repeated(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), None))


@jit(types.void(_MATRIX, _PANELS, _MATRIX))
def multiply_rows(rows: Any, panels: Any, out: Any) -> None:
    """Writes rows [n, in] times the weight in panels [⌈out / PANEL⌉, in, PANEL] to out [n, out].

    A row's numbers do not depend on `n`: products are added one after another, in the order of the inputs, for each
    `SPAN` of these from zero; then the sums of spans are added. Each product and addition are rounded once together
    where the processor can (FMA). The weight is read from memory once for all rows.
    """
    num_rows, num_inputs = rows.shape
    num_outputs = out.shape[1]
    num_tiles = (num_rows + TILE - 1) // TILE
    sums = np.empty((TILE, PANEL), np.float32)
    for panel in range(panels.shape[0]):
        left = panel * PANEL
        width = min(PANEL, num_outputs - left)
        for start in range(0, num_inputs, SPAN):
            stop = min(start + SPAN, num_inputs)
            for tile in range(num_tiles):
                first = num_rows * tile // num_tiles
                count = num_rows * (tile + 1) // num_tiles - first
                _sum_products(rows, first, count, panels, panel, start, stop, sums)
                for row in range(count):
                    mine = out[first + row]
                    for j in range(width):
                        mine[left + j] = sums[row, j] if start == 0 else mine[left + j] + sums[row, j]
