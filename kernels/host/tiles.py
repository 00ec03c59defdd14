"""A few rows times some columns of a matrix, whose sums stay in registers, and matrices turned over."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from outrider.kernels.host.compiler import jit

PANEL = 16  # columns
HAS_AVX512 = bool(get_host_cpu_features().get("avx512f"))  # and so 32 registers, of AVX2's 16
_LANES = 16 if HAS_AVX512 else 8  # of a register
# Rows that share what is read of a panel: of AVX2's registers twelve are for their sums.
TILE = 8 if HAS_AVX512 else 6
# Panels that are read together: the sums of a single one would wait for one another where rows are few. With more of
# AVX-512's registers for sums than 16, LLVM keeps some of the sums of 10 and 11 rows in memory, as it unrolls the loop.
MOST_PANELS = 4
_MOST_SUMS = 16 if HAS_AVX512 else 4  # panels times rows, of several panels
_PANELS = tuple(
    max(1, min(MOST_PANELS, _MOST_SUMS // rows)) for rows in range(1, TILE + 1)
)  # for one row, two, ...
# Numbers by which a matrix of uint16 is read ahead, also across pages, where the processor stops by itself. Of matrices
# that no cache holds, 5 rows of 640 inputs take 187, 170, 117 and 142 us with 0, 512, 1,024 and 2,048 (Zen 3). All of
# the embedded target's, which Zen 5's last cache holds, take 0.89, 0.81, 0.71 and 0.65 ms for 5 rows with 1,024, 2,048,
# 4,096 and 8,192, and 1.14, 1.04, 0.98 and 0.94 for 8.
PREFETCHED = 4096 if HAS_AVX512 else 1024
_INDEX, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_PLACES = ir.VectorType(ir.IntType(32), _LANES)
# The first halves of two registers, and the last, by turns.
_INTERLEAVED = [
    ir.Constant(_PLACES, [first + i // 2 + i % 2 * _LANES for i in range(_LANES)])
    for first in (0, _LANES // 2)
]


@jit()
def add_product(rows: Any, matrix: Any, sums: Any) -> None:
    """Adds rows [n, in] · matrix [in, out] to sums [n, out], input after input; n is at most `TILE`, `in` at least 1.

    `out` is a multiple of `PANEL`. All are float32, and each may be part of something wider; a matrix of uint16 has the
    upper halves of float32, bfloat16, and is read from memory ahead of its use. A product and its addition are rounded
    once where the processor can (FMA).
    """
    width = _PANELS[rows.shape[0] - 1] * PANEL
    for left in range(0, matrix.shape[1], width):
        _add_tile(rows, matrix[:, left : left + width], sums[:, left:])


@intrinsic  # type: ignore[untyped-decorator]
def _add_tile(_: Any, rows: Any, matrix: Any, sums: Any) -> Any:
    """Adds the product with at most `_PANELS` panels.

    For each number of rows and panels there is a loop whose sums stay in registers; numba's arrays would not.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arrays = _arrays(context, builder, signature, values)
        num_rows = builder.extract_value(arrays[0].shape, 0)
        num_panels = builder.sdiv(builder.extract_value(arrays[1].shape, 1), _INDEX(PANEL))
        done = builder.append_basic_block("done")
        choice = builder.switch(builder.add(builder.mul(num_rows, _INDEX(MOST_PANELS)), num_panels), done)
        for rows_, most_panels in enumerate(_PANELS, start=1):
            for panels in range(1, most_panels + 1):
                block = builder.append_basic_block(f"rows_{rows_}_panels_{panels}")
                choice.add_case(_INDEX(rows_ * MOST_PANELS + panels), block)
                builder.position_at_end(block)
                _add_loop(builder, arrays, rows_, panels * PANEL)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(rows, matrix, sums), generate


def _add_loop(builder: Any, arrays: Any, num_rows: int, num_columns: int) -> None:
    """Adds the loop over inputs for so many rows and columns."""
    rows, matrix, sums = arrays
    columns = range(0, num_columns, _LANES)
    inputs = [_place(builder, rows, _INDEX(row), _INDEX(0)) for row in range(num_rows)]
    places = [
        _vector(builder, _place(builder, sums, _INDEX(row), _INDEX(column)))
        for row in range(num_rows)
        for column in columns
    ]
    multiply_and_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{_LANES}f32"
    )
    first = [builder.load(place, align=4) for place in places]
    begin, loop, end = builder.block, builder.append_basic_block("input"), builder.append_basic_block("sums")
    builder.branch(loop)

    builder.position_at_end(loop)
    i = builder.phi(_INDEX)
    i.add_incoming(_INDEX(0), begin)
    before = [builder.phi(_VECTOR) for _ in places]
    factors = [_loaded(builder, matrix, i, column) for column in columns]
    after, totals = [], iter(before)
    for mine in inputs:
        x = _repeated(builder, builder.load(builder.gep(mine, [i])))
        after += [builder.call(multiply_and_add, [x, factor, next(totals)]) for factor in factors]
    following = builder.add(i, _INDEX(1))
    i.add_incoming(following, loop)
    for old, start, new in zip(before, first, after, strict=True):
        old.add_incoming(start, begin)
        old.add_incoming(new, loop)
    is_more = builder.icmp_signed("<", following, builder.extract_value(rows.shape, 1))
    builder.cbranch(is_more, loop, end)

    builder.position_at_end(end)
    for place, new in zip(places, after, strict=True):
        builder.store(new, place, align=4)


@intrinsic  # type: ignore[untyped-decorator]
def turn(_: Any, matrix: Any, out: Any) -> Any:
    """Writes a matrix [m, n] to out [n, m]: float32, both numbers multiples of `PANEL`."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        source, target = _arrays(context, builder, signature, values)
        num_rows, num_columns = (builder.extract_value(source.shape, axis) for axis in (0, 1))
        zero, step = _INDEX(0), _INDEX(_LANES)
        with (
            cgutils.for_range_slice(builder, zero, num_rows, step, _INDEX) as (row, _),
            cgutils.for_range_slice(builder, zero, num_columns, step, _INDEX) as (column, _),
        ):
            block = [
                builder.load(
                    _vector(builder, _place(builder, source, builder.add(row, _INDEX(i)), column)), align=4
                )
                for i in range(_LANES)
            ]
            half = _LANES // 2
            for _ in range(half.bit_length()):
                block = [
                    builder.shuffle_vector(block[i], block[i + half], places)
                    for i in range(half)
                    for places in _INTERLEAVED
                ]
            for i, vector in enumerate(block):
                place = _place(builder, target, builder.add(column, _INDEX(i)), row)
                builder.store(vector, _vector(builder, place), align=4)
        return context.get_dummy_value()

    return types.void(matrix, out), generate


def _arrays(context: Any, builder: Any, signature: Any, values: Any) -> list[Any]:
    return [
        context.make_array(kind)(context, builder, value)
        for kind, value in zip(signature.args, values, strict=True)
    ]


def _place(builder: Any, matrix: Any, row: Any, column: Any) -> Any:
    """Returns where matrix[row, column] lies."""
    width = builder.sdiv(builder.extract_value(matrix.strides, 0), matrix.itemsize)
    return builder.gep(matrix.data, [builder.add(builder.mul(row, width), column)])


def _vector(builder: Any, place: Any) -> Any:
    return builder.bitcast(place, _VECTOR.as_pointer())


def _loaded(builder: Any, matrix: Any, row: Any, column: int) -> Any:
    """Returns the float32 numbers of a register from matrix[row, column] on."""
    place = _place(builder, matrix, row, _INDEX(column))
    if place.type.pointee == _FLOAT:
        return builder.load(_vector(builder, place), align=4)
    if column == 0:
        _prefetch(builder, builder.gep(place, [_INDEX(PREFETCHED)]))
    halves = builder.bitcast(place, ir.VectorType(ir.IntType(16), _LANES).as_pointer())
    bits = builder.zext(builder.load(halves, align=2), _PLACES)
    return builder.bitcast(builder.shl(bits, ir.Constant(_PLACES, [16] * _LANES)), _VECTOR)


def _prefetch(builder: Any, place: Any) -> None:
    """Reads a line of memory into all caches, where there is memory."""
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    is_read, nearest, is_data = number(0), number(3), number(1)
    builder.call(prefetch, [builder.bitcast(place, byte), is_read, nearest, is_data])


def _repeated(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_PLACES, None))
