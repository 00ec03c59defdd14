"""Few rows are multiplied by our kernel with the library's bits, or by the library."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.cloud_verifier.backends.base import ForwardItem, Logits, open_sequence
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.products import packed
from outrider.cloud_verifier.backends.products.packed import MANY_ROWS, TIMED_ROWS, OwnKernel, PackedLinear
from outrider.cloud_verifier.backends.products.row_plan import MatrixKind, RowPlan
from outrider.kernels.host.product import SPANS, TILE, PanelProduct, to_panels
from outrider.kernels.host.threads import Helpers

SPAN = SPANS[0]
SIZES = [(1, 3), (13, 5), (384, 640), (100, 37), (SPAN, 24), (SPAN + 1, 129), (3 * SPAN + 5, 40)]  # in, out
ALONE = Helpers(0)
TEXT = [(37 * i + 11) % 300 for i in range(40)]


def make_matrix(
    num_inputs: int, num_outputs: int, *, has_bias: bool, is_bfloat16: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(num_inputs)
    weight = torch.randn((num_outputs, num_inputs), generator=generator)
    weight = weight.bfloat16().float() if is_bfloat16 else weight
    return weight, torch.randn(num_outputs, generator=generator) if has_bias else None


def multiplied(rows: torch.Tensor, weight: torch.Tensor, span: int, helpers: Helpers = ALONE) -> torch.Tensor:
    out = torch.full((len(rows), len(weight)), torch.nan)
    rows = rows.contiguous()
    PanelProduct(weight.numpy(), span).multiply(rows.data_ptr(), len(rows), out.data_ptr(), helpers)
    return out


def loaded(*products: PackedLinear, own: OwnKernel) -> int:
    kinds = [
        MatrixKind(each.num_inputs, each.num_outputs, lambda weight: PackedLinear(weight, None, own))
        for each in products
    ]
    own.load(products, kinds)
    return own.most_rows


def script_clock(monkeypatch: pytest.MonkeyPatch, shares: dict[int, float]) -> None:
    """Our kernel takes a share of the library's time, by the number of rows."""

    def seconds(runs: Any) -> list[float]:
        product, x = runs[0]
        product(x)
        return [shares[len(x)] if product.__name__ == "by_own_kernel" else 1.0] * len(runs)

    monkeypatch.setattr(packed, "_seconds", seconds)


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    script_clock(monkeypatch, dict.fromkeys(TIMED_ROWS, 0.5))


@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_summed_alike_among_any_number_of_rows(size: tuple[int, int], is_bfloat16: bool) -> None:
    weight, _ = make_matrix(*size, has_bias=False, is_bfloat16=is_bfloat16)
    x = torch.randn((2 * TILE + 1, size[0]), generator=torch.Generator().manual_seed(1))
    assert to_panels(weight.numpy()).dtype == (np.uint16 if is_bfloat16 else np.float32)
    whole = multiplied(x, weight, SPAN)
    exact = x.double() @ weight.double().t()
    assert torch.allclose(whole.double(), exact, rtol=1e-4, atol=1e-4)
    for first, last in [(3, 3 + count) for count in range(1, TILE + 3)]:
        assert torch.equal(multiplied(x[first:last], weight, SPAN), whole[first:last])


@pytest.mark.parametrize("size", SIZES)
def test_numbers_of_bfloat16_have_their_bits_in_half_the_memory(size: tuple[int, int]) -> None:
    """Negative zeros, denormal numbers, infinities and NaN too; one number that has more digits keeps all wide."""
    weight = make_matrix(*size, has_bias=False, is_bfloat16=True)[0].numpy()
    special = np.array([0x80000000, 0x00010000, 0x7F800000, 0xFFC00000], np.uint32).view(np.float32)
    weight.flat[: len(special)] = special[: weight.size]
    halves = to_panels(weight)
    wide = (halves.astype(np.uint32) << 16).view(np.float32)
    weight.flat[-1] = np.nextafter(weight.flat[-1], np.float32(9))
    expected = to_panels(weight)
    same = wide.view(np.uint32) == expected.view(np.uint32)
    assert halves.dtype == np.uint16 and expected.dtype == np.float32 and (~same).sum() == 1


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_bfloat16", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_few_rows_have_the_bits_of_many(size: tuple[int, int], is_bfloat16: bool, has_bias: bool) -> None:
    own = OwnKernel()
    product = PackedLinear(*make_matrix(*size, has_bias=has_bias, is_bfloat16=is_bfloat16), own)
    x = torch.randn((80, size[0]), generator=torch.Generator().manual_seed(2))
    whole = product(x)
    if not loaded(product, own=own):
        pytest.skip("the library's products of this machine are summed in another order")
    for count in (1, 2, 3, 5, 6, 7, 40, MANY_ROWS, MANY_ROWS + 1):
        assert torch.equal(product(x[:count]), whole[:count])
    wide = torch.cat((x, x), dim=1)[:3, : size[0]]  # a view, as of half a product
    assert torch.equal(product(wide), whole[:3])
    assert product(x[:0]).shape == (0, size[1]), "where no row's logits are asked for"


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("span", SPANS)
def test_inputs_are_summed_in_the_spans_of_the_library(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's differ between processors."""

    def by_library(product: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        return multiplied(x, product._packed.to_dense(), span)

    monkeypatch.setattr(PackedLinear, "by_library", by_library)
    own = OwnKernel()
    product = PackedLinear(*make_matrix(SPAN + 1, 40, has_bias=False), own)
    assert loaded(product, own=own) and own.spans == {(SPAN + 1, 40): span}
    x = torch.randn((3, SPAN + 1), generator=torch.Generator().manual_seed(4))
    assert torch.equal(product(x), product.by_library(x))


@pytest.mark.usefixtures("_fast")
@pytest.mark.parametrize("kernel", ["of another order", "none"])
def test_the_library_multiplies_where_our_kernel_has_other_bits_or_cannot_be_compiled(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FromTheLast:
        """As if inputs were summed from the last to the first."""

        def __init__(self, weight: Any, span: int) -> None:
            self._weight, self._span = torch.from_numpy(weight), span

        def multiply(self, rows_at: int, num_rows: int, out_at: int, helpers: Helpers) -> None:
            shapes = (num_rows, self._weight.shape[1]), (num_rows, self._weight.shape[0])
            rows, out = (
                torch.from_numpy(
                    np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), shape)
                )
                for at, shape in zip((rows_at, out_at), shapes, strict=True)
            )
            out[:] = multiplied(rows.flip(1), self._weight.flip(1), self._span)

    changed = types.SimpleNamespace(PanelProduct=FromTheLast, SPANS=SPANS)
    module = None if kernel == "none" else changed
    monkeypatch.setitem(sys.modules, "outrider.kernels.host.product", module)
    own = OwnKernel()
    product = PackedLinear(*make_matrix(384, 64, has_bias=False), own)
    x = torch.randn((1, 384), generator=torch.Generator().manual_seed(3))
    assert loaded(product, own=own) == 0
    assert torch.equal(product(x), product.by_library(x))


@pytest.mark.parametrize(
    ("shares", "most"),
    [
        ({1: 1.4}, 0),
        ({1: 1.1, 8: 1.1, 16: 1.4}, 8),
        ({1: 0.8, 8: 0.8, 16: 1.1, 24: 1.4}, 16),
        ({1: 1.1, 8: 1.0, 16: 0.9, 24: 0.8, 40: 0.8, 64: 1.0, 96: 1.4}, 64),
        (dict.fromkeys(TIMED_ROWS, 1.1), 128),
    ],
)
def test_our_kernel_is_used_for_as_many_rows_as_it_takes_little_longer(
    shares: dict[int, float], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_clock(monkeypatch, shares)
    own = OwnKernel()
    product = PackedLinear(*make_matrix(64, 32, has_bias=False), own)
    monkeypatch.setattr(own, "_find_span", lambda *_: own.spans.setdefault((64, 32), SPAN))
    assert loaded(product, own=own) == most
    assert (product._product is None) == (most == 0), "a copy of the weights is kept that nothing reads"


def test_a_disturbed_turn_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"by_own_kernel": [9.0, 9.0, 1.0], "by_library": [1.0, 1.0, 9.0]}

    def seconds(runs: Any) -> list[float]:
        mine = times[runs[0][0].__name__]
        return [mine.pop(0) if len(mine) > 1 else mine[0]]

    monkeypatch.setattr(packed, "_seconds", seconds)
    own = OwnKernel()
    product = PackedLinear(*make_matrix(64, 32, has_bias=False), own)
    assert packed._most_fast_rows([product]) == TIMED_ROWS[-1]


def logits(backend: PagedBackend, *counts: int) -> Logits:
    """Of a text that is fed so many tokens at a time."""
    rows, fed = [], 0
    with open_sequence(backend) as sequence:
        for count in counts:
            rows.append(backend.forward([ForwardItem(sequence, TEXT[fed : fed + count], count)]).copy())
            fed += count
    return np.concatenate(rows)


def test_the_clock_says_nothing_about_bits(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a machine that is busy at one start and not at another."""
    found = []
    for shares in ({1: 2.0}, {1: 1.0, 8: 2.0}, dict.fromkeys(TIMED_ROWS, 0.5)):
        script_clock(monkeypatch, shares)
        backend = load_target(target_of("qwen2"), kv_tokens=2048, exact_rows="on")
        assert backend.is_reproducible and isinstance(backend.row_plan, RowPlan)
        most = backend.decoder.most_own_rows
        assert [backend.row_plan.fit(count) for count in (1, 2, 3)] == [
            count if count <= most else 4 for count in (1, 2, 3)
        ]
        found.append(logits(backend, 9, 1, 1, 2, 3, 4, 7, 13))
        assert np.array_equal(found[-1], logits(backend, 40))
    assert all(np.array_equal(found[0], each) for each in found)


def test_weights_of_a_large_target_are_kept_once(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.backends.layers.MAX_DUPLICATED_BYTES", 1000)
    backend = load_target(target_of("qwen2"), kv_tokens=2048)
    assert backend.decoder.most_own_rows == 0 and backend.is_reproducible


@pytest.mark.usefixtures("_fast")
def test_one_thread_computes_the_rows_of_our_kernel_and_all_of_them_more(
    target_of: Callable[[str], Path],
) -> None:
    """Others that are woken for an operation of microseconds wait for cores that are in use."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        backend = load_target(target_of("qwen2"), kv_tokens=2048)
        decoder: Any = backend.decoder
        decoder._reader.own_kernel.most_rows = 8
        head, found = decoder._head, list[int]()

        def counted(x: torch.Tensor) -> torch.Tensor:
            found.append(torch.get_num_threads())
            return head(x)  # type: ignore[no-any-return]

        decoder._head = counted
        for count, num_threads in ((1, 1), (8, 1), (9, 2)):
            logits(backend, count)
            assert set(found) == {num_threads} and torch.get_num_threads() == 2
            found.clear()
    finally:
        torch.set_num_threads(before)
