"""The product of some rows with a matrix, as fast as memory is read, with a library's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from outrider.kernels.host.compiler import c_function, jit
from outrider.kernels.host.threads import CALL, Helpers, pointer, share, take
from outrider.kernels.host.tiles import HAS_AVX512, PANEL, TILE, add_product

# Inputs that oneDNN sums by themselves: by the processor and by how many there are.
SPANS = (1024, 512)
WIDTH = 2 * PANEL if HAS_AVX512 else PANEL  # outputs whose weights lie together
# Of a panel that stay in the first cache for all rows, also where two threads share it.
_CHUNK_BYTES = 1 << 14
_MATRIX = types.float32[:, ::1]
_PANELS, _HALF_PANELS = types.float32[:, :, ::1], types.uint16[:, :, ::1]


def to_panels(weight: NDArray[np.float32]) -> NDArray[np.float32] | NDArray[np.uint16]:
    """Returns a weight [out, in] in panels [⌈out / WIDTH⌉, in, WIDTH], as `PanelProduct` reads it: of a weight whose
    numbers are all of bfloat16 the upper halves alone, which are read from memory in half the time."""
    num_outputs, num_inputs = weight.shape
    shape = -(-num_outputs // WIDTH), num_inputs, WIDTH
    halves = weight.view(np.uint16).reshape(num_outputs, num_inputs, 2)
    if halves[:, :, 0].any():  # the lower half, on machines that are little-endian, as all with AVX2 are
        panels = np.empty(shape, np.float32)
        _fill_panels(weight, panels)
        return panels
    half_panels = np.empty(shape, np.uint16)
    _fill_panels(np.ascontiguousarray(halves[:, :, 1]), half_panels)
    return half_panels


@jit([types.void(_MATRIX, _PANELS), types.void(types.uint16[:, ::1], _HALF_PANELS)])
def _fill_panels(weight: Any, panels: Any) -> None:
    """Writes a weight to panels, the last with zeros where it ends."""
    num_outputs, num_inputs = weight.shape
    for panel in range(panels.shape[0]):
        first = panel * WIDTH
        mine = panels[panel]
        for i in range(num_inputs):
            for j in range(WIDTH):
                mine[i, j] = weight[first + j, i] if first + j < num_outputs else 0


@jit()
def _multiply_panel(rows: Any, panels: Any, panel: Any, span: Any, out: Any, sums: Any) -> None:
    """Writes the outputs of one panel; `sums` [rows, WIDTH] is anything."""
    num_rows, num_inputs = rows.shape
    left = panel * WIDTH
    width = min(WIDTH, out.shape[1] - left)
    num_tiles = (num_rows + TILE - 1) // TILE
    at_once = _CHUNK_BYTES // (WIDTH * panels.itemsize)
    for start in range(0, num_inputs, span):
        end = min(start + span, num_inputs)
        sums[:] = 0
        for begin in range(start, end, at_once):
            stop = min(begin + at_once, end)
            for tile in range(num_tiles):
                first, after = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
                add_product(rows[first:after, begin:stop], panels[panel, begin:stop], sums[first:after])
        for row in range(num_rows):
            mine = out[row]
            for j in range(width):
                mine[left + j] = sums[row, j] if start == 0 else mine[left + j] + sums[row, j]


class PanelProduct:
    """The product with one weight [out, in]. Not thread-safe. `function_at` and `call_at` are addresses for
    `multiply`."""

    def __init__(self, weight: NDArray[np.float32], span: int) -> None:
        """Products of every `span` inputs are summed by themselves."""
        self._panels = panels = to_panels(weight)  # as long as their address is used
        is_half = panels.dtype == np.uint16
        self.function_at = (_multiply_halves if is_half else _multiply_share).address
        self._call = np.array((0, 0, panels.ctypes.data, 0, 0, *weight.shape[::-1], span), np.int64)
        self.call_at = self._call.ctypes.data

    def multiply(self, rows_at: int, num_rows: int, out_at: int, helpers: Helpers) -> None:
        """Writes rows [n, in] times the weight to out [n, out]: float32 and contiguous, given by their addresses.

        A row's numbers do not depend on `n`, nor on who helps: products are added one after another, in the order of
        the inputs, for each span of these from zero; then the sums of spans are added. Each product and addition are
        rounded once together where the processor can (FMA). The weight is read from memory once for all rows.
        """
        call = self._call
        call[0], call[1], call[3], call[4] = 0, rows_at, out_at, num_rows
        helpers.run(self.function_at, self.call_at)


def _shared(kind: Any) -> Any:
    """Returns the function in C that each thread calls, for panels of this kind: it multiplies the next panel, until
    there are no more."""

    @c_function(types.void(CALL))
    def multiply_share(call: Any) -> None:
        num_rows, num_inputs, num_outputs, span = call[4], call[5], call[6], call[7]
        num_panels = (num_outputs + WIDTH - 1) // WIDTH
        rows = carray(pointer(call[1]), (num_rows, num_inputs), np.float32)
        panels = carray(pointer(call[2]), (num_panels, num_inputs, WIDTH), kind)
        out = carray(pointer(call[3]), (num_rows, num_outputs), np.float32)
        sums = np.empty((num_rows, WIDTH), np.float32)
        panel = take(call)
        while panel < num_panels:
            _multiply_panel(rows, panels, panel, span, out, sums)
            panel = take(call)

    return multiply_share


_multiply_share, _multiply_halves = _shared(np.float32), _shared(np.uint16)


@jit()
def multiply(pool_at: Any, function_at: Any, call_at: Any, rows_at: Any, num_rows: Any, out_at: Any) -> None:
    """Is `PanelProduct.multiply` for compiled functions (`threads.share`)."""
    call = carray(pointer(call_at), 8, np.int64)
    call[0], call[1], call[3], call[4] = 0, rows_at, out_at, num_rows
    share(pool_at, function_at, call_at)
