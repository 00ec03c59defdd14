"""A token's logits have the same bits whatever shares its forward, or the target is not called reproducible."""

from __future__ import annotations

import gc
import itertools
import logging
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import make_tiny_target
from torch.nn.functional import linear as library_linear

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.exact_rows import make_prompts
from benchmarks.reliability.planted import plant
from outrider.cloud_verifier.backends import exact_rows
from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, PagedAttention
from outrider.cloud_verifier.backends.attention.tiled import TiledPlanner, span_end
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.exact_rows import check_forwards, use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.feeds import Feed, split_feeds
from outrider.cloud_verifier.backends.products import row_plan
from outrider.cloud_verifier.backends.products.row_plan import (
    ON_CPU,
    ON_GPU,
    MatrixKind,
    Product,
    RowPlan,
    find_row_plan,
    products_ms,
)
from outrider.cloud_verifier.backends.products.ways import (
    Linear,
    OwnKernel,
    ProductWay,
    UnsplitLibrary,
    product_ways,
)
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.kv.blocks import BlockTable
from outrider.cloud_verifier.server.cli import describe_target
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams

CPU = torch.device("cpu")
TEXT = [(37 * i + 11) % 300 for i in range(300)]
NUM_NEW = 14
CASES = [
    ("llama", "float32", "lean"),
    ("llama", "bfloat16", "lean"),
    ("qwen2", "float32", "lean"),
    ("qwen2", "float32", "transformers"),
    ("qwen2", "bfloat16", "lean"),
    ("gpt2", "bfloat16", "transformers"),
    ("qwen3", "bfloat16", "cuda"),
]


@pytest.fixture(params=CASES, scope="module")
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> PagedBackend:
    arch, dtype, decoder = request.param
    return load_target(target_of(arch), dtype=dtype, decoder=decoder, kv_tokens=2048, exact_rows="on")


def score(backend: PagedBackend, fed: list[int], num_rows: int, start: int = 0) -> Logits:
    """The last rows after TEXT[:start] and `fed`."""
    sequence = backend.new_sequence()
    if start:
        backend.forward([ForwardItem(sequence, TEXT[:start], 0)])
    rows = backend.forward([ForwardItem(sequence, fed, num_rows)]).copy()
    backend.close(sequence)
    return rows


def test_rows_are_the_same_in_every_forward(backend: PagedBackend) -> None:
    """Longer than a plan's largest count, over several spans of positions."""
    assert backend.is_reproducible and ", reproducible, " in describe_target(backend)
    assert make_model_info(backend, ServeConfig()).is_reproducible
    whole = score(backend, TEXT, len(TEXT))
    sequence, others = backend.new_sequence(), [backend.new_sequence() for _ in range(3)]
    for start, count in ((0, 60), (60, 1), (61, 1), (62, 5), (67, 40), (107, 33), (140, 1), (141, 159)):
        fed = TEXT[start : start + count]
        rows = backend.forward([ForwardItem(sequence, fed, count)])
        assert np.array_equal(rows, whole[start : start + count]), (start, count)
        backend.truncate(sequence, start)
        items = [ForwardItem(other, TEXT[: 1 + 3 * i], 1) for i, other in enumerate(others)]
        beside = backend.forward([*items[:2], ForwardItem(sequence, fed, count), *items[2:]])
        assert np.array_equal(beside[2 : 2 + count], whole[start : start + count]), (start, count)
    for each in (sequence, *others):
        backend.close(each)


def test_nan_in_blocks_that_nobody_holds_reaches_no_pass_of_a_split_forward(
    backend: PagedBackend,
) -> None:
    whole = score(backend, TEXT, len(TEXT))
    assert backend.row_plan is not None and len(TEXT) > backend.row_plan.most
    for pool in backend.memory.tensors:
        pool.fill_(float("nan"))
    assert np.array_equal(score(backend, TEXT, len(TEXT)), whole)


class Kept(AttentionPlanner):
    """Notes how many attentions of passes that have begun are kept, as memory for the kernel's is."""

    def __init__(self, planner: AttentionPlanner) -> None:
        self.planner = planner
        self.begun: weakref.WeakSet[KeptAttention] = weakref.WeakSet()
        self.num_kept: list[int] = []

    def plan(self, sequences: Sequence[PackedSequence]) -> PagedAttention:
        return KeptAttention(self, self.planner.plan(sequences))


class KeptAttention:
    def __init__(self, kept: Kept, attention: PagedAttention) -> None:
        self._kept, self._attention = kept, attention

    def __call__(self, *tensors: Any) -> torch.Tensor:
        self._kept.begun.add(self)
        self._kept.num_kept.append(len(self._kept.begun))
        return self._attention(*tensors)


def test_a_pass_gives_the_memory_of_its_attention_back_before_the_next_one(
    plain: PagedBackend,
) -> None:
    plain.row_plan = RowPlan((8, 64))
    plain.planner = kept = Kept(plain.planner)
    gc.disable()
    try:
        score(plain, TEXT, len(TEXT))
    finally:
        gc.enable()
    assert kept.num_kept == [1] * (plain.facts.num_layers * -(-len(TEXT) // 64))


def test_a_plan_pads_and_splits() -> None:
    plan = RowPlan((4, 8, 16))
    assert [plan.fit(n) for n in (1, 4, 5, 9, 16)] == [4, 4, 8, 16, 16]
    tables = [BlockTable("a"), BlockTable("b")]
    feeds = [Feed(tables[0], 3, range(20), 18), Feed(tables[1], 0, range(5), 1)]
    passes = list(split_feeds(feeds, 16))
    found = [[(each.past, list(each.token_ids), each.num_logit_rows) for each in part] for part in passes]
    assert found == [
        [(3, list(range(16)), 14)],
        [(19, [16, 17, 18, 19], 4), (0, [0, 1, 2, 3, 4], 1)],
    ]


def test_spans_end_where_the_position_alone_says() -> None:
    assert [span_end(p) for p in (0, 63, 64, 200, 511, 512, 1023, 1024)] == [
        *(64, 64, 128, 256, 512, 1024, 1024, 1536),
    ]


def linear(weight: torch.Tensor) -> Product:
    """Equal at every number of rows: one row at a time."""
    return lambda x: torch.stack([(weight.float() * row.float()).sum(-1) for row in x]).to(x.dtype)


def other_at(count: int, *, only_last: bool = False) -> Callable[[torch.Tensor], Product]:
    """A product that sums in another order at one number of rows, or in its last row then."""

    def make(weight: torch.Tensor) -> Product:
        def product(x: torch.Tensor) -> torch.Tensor:
            out = linear(weight)(x)
            if x.shape[0] == count:
                half = x.shape[1] // 2
                other = linear(weight[:, :half])(x[:, :half]) + linear(weight[:, half:])(x[:, half:])
                out[-1:] = other[-1:]
                out = out if only_last else other
            return out

        return product

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("only_last", [False, True])
def test_a_product_that_differs_at_one_count_is_left_out(dtype: torch.dtype, only_last: bool) -> None:
    kinds = [MatrixKind(64, 8, linear), MatrixKind(48, 8, other_at(12, only_last=only_last))]
    plan = find_row_plan(kinds, dtype, torch.device("cpu"))
    assert plan is not None and plan.counts == tuple(count for count in ON_CPU.counts if count != 12)


def test_where_every_count_differs_all_is_padded_to_one() -> None:
    def make(weight: torch.Tensor) -> Product:
        return lambda x: linear(weight)(x) + x.shape[0]

    plan = find_row_plan([MatrixKind(32, 8, make)], torch.float32, torch.device("cpu"))
    assert plan is not None and len(plan.counts) == 1
    assert ON_CPU.cost(plan) == min(ON_CPU.cost(RowPlan((count,))) for count in ON_CPU.counts)


def test_no_clock_says_what_is_tried_at_the_start(
    plain: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is so busy that each product takes minutes."""
    clock = itertools.count(step=100.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    plan = find_row_plan([MatrixKind(64, 8, linear)] * 2, torch.float32, CPU)
    assert plan == RowPlan(ON_CPU.counts)
    use_exact_rows(plain, "on")
    forward, fed = type(plain).forward, list[int]()

    def counted(backend: PagedBackend, items: Sequence[ForwardItem]) -> Logits:
        fed.append(len(items[0].token_ids) if len(items) == 1 else 0)
        return forward(backend, items)

    monkeypatch.setattr(type(plain), "forward", counted)
    check_forwards(plain)
    assert fed.count(1) == 10
    monkeypatch.setattr(plain, "num_weight_bytes", 14 << 30)
    fed.clear()
    check_forwards(plain)
    assert fed.count(1) == 4, "of a large target fewer"


def test_of_large_matrices_the_most_useful_counts_are_tried() -> None:
    def kinds(hidden: int, inner: int, vocab: int) -> list[MatrixKind]:
        shapes = ((hidden, hidden), (hidden, 2 * inner), (inner, hidden), (hidden, vocab))
        return [MatrixKind(*shape, linear) for shape in shapes]

    sizes = {"embedded": (384, 1024, 8192), "0.5B": (896, 4864, 151_936), "7B": (3584, 18_944, 152_064)}
    tried = {name: ON_CPU.tried(kinds(*size)) for name, size in sizes.items()}
    assert tried["embedded"] == ON_CPU.counts
    assert tried["0.5B"] == (4, 5, 6, 8, 10, 12, 16, 20, 24, 40, 64, 256)
    assert tried["7B"] == (4, 5, 64)
    for name, size in sizes.items():
        num_rows = sum(ON_CPU.pass_rows + count for count in tried[name])
        num_numbers = sum(kind.num_inputs * kind.num_outputs for kind in kinds(*size))
        assert 2 * num_rows * num_numbers <= ON_CPU.max_multiplications
        assert ON_GPU.tried(kinds(*size)) == ON_GPU.counts
    assert ON_CPU.tried(kinds(32_768, 131_072, 1_000_000)) == (4,), "at least one"


def test_a_large_targets_rows_are_not_called_equal_by_a_few_counts(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = load_target(target_of("llama"), kv_tokens=2048, exact_rows="off")
    monkeypatch.setattr(exact_rows, "ON_CPU", replace(ON_CPU, max_multiplications=1e7))
    for name in ("check_attention", "check_forwards", "check_trees"):
        monkeypatch.setattr(exact_rows, name, lambda _: None)
    assert not exact_rows.has_equal_rows(backend)


def test_on_a_gpu_one_count_costs_little_and_is_taken_where_no_two_agree() -> None:
    """Up to 200 rows a step costs what one row does: 128 rows cover decoding and verifying, and prefill in four."""
    assert ON_GPU.cheapest({count: count for count in ON_GPU.counts}) == RowPlan((128,))
    assert ON_GPU.cheapest(dict.fromkeys(ON_GPU.counts, b"equal")) == RowPlan(ON_GPU.counts)
    assert ON_GPU.cheapest({8: b"a", 128: b"a", 256: b"b"}) == RowPlan((8, 128))
    assert ON_GPU.cheapest({8: b"a", 64: None}) == RowPlan((8,))
    assert ON_GPU.cheapest({8: None}) is None


def halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The library's product, summed in another order."""
    half = x.shape[-1] // 2
    return library_linear(x[..., :half], weight[:, :half]) + library_linear(
        x[..., half:], weight[:, half:], bias
    )


def by_place(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = library_linear(x, weight, bias)
    out[..., 1::4, :] = halves(x, weight, bias)[..., 1::4, :]
    return out


def by_neighbours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As a quantised product that treats a column apart where any row's value is large."""
    return (halves if x.abs().max() > 100 else library_linear)(x, weight, bias)


def by_count(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return (halves if x.shape[-2] in (8, 32, 128) else library_linear)(x, weight, bias)


@pytest.mark.parametrize("multiply", [by_place, by_neighbours])
def test_a_product_that_looks_at_places_or_neighbours_is_right_at_no_count(multiply: Linear) -> None:
    kind = MatrixKind(64, 40, lambda weight: lambda x: multiply(x, weight, None))
    assert find_row_plan([kind], torch.bfloat16, torch.device("cpu"), ON_GPU) is None


def way_of(name: str, multiply: Linear) -> ProductWay:
    class Way(ProductWay):
        def enter(self, dtype: torch.dtype) -> Linear:
            return multiply

    way = Way()
    way.name = name
    return way


@pytest.fixture
def plain(target_of: Callable[[str], Path]) -> PagedBackend:
    """Without exact rows: what the ways are tried on, with a GPU's counts."""
    return load_target(target_of("qwen2"), dtype="bfloat16", kv_tokens=2048, exact_rows="off")


@pytest.mark.parametrize("multiply", [by_place, by_neighbours])
def test_the_next_way_to_multiply_is_taken_where_one_fails(plain: PagedBackend, multiply: Linear) -> None:
    ways = [way_of("planted", multiply), way_of("right", library_linear), way_of("not tried", by_place)]
    use_exact_rows(plain, "on", ways=ways, choices=ON_GPU)
    assert plain.is_reproducible and plain.product_way == "right"
    plain.device = "cuda"
    assert ", reproducible in products of 8 to 512 rows by right, cuda" in describe_target(plain)
    plain.device = "cpu"
    assert texts_unlike(plain) == 0


def test_a_way_in_which_more_counts_agree_is_taken_before_one_with_few(plain: PagedBackend) -> None:
    """As on an H100, where the library's rows agree at up to 128 rows, and at all counts once its products are not
    split: steps of more rows take fewer passes."""

    def by_size(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return (halves if x.shape[-2] > 128 else library_linear)(x, weight, bias)

    left: list[str] = []
    ways = [way_of("few", by_size), way_of("all", library_linear), way_of("not tried", by_place)]
    for way in ways:
        way.leave = partial(left.append, way.name)  # type: ignore[method-assign]
    use_exact_rows(plain, "on", ways=ways, choices=ON_GPU)
    assert plain.product_way == "all" and plain.row_plan == RowPlan(ON_GPU.counts)
    assert left == ["few", "all"] and texts_unlike(plain) == 0


def test_a_slower_way_is_taken_where_the_others_take_more_passes_than_it_is_slower(
    plain: PagedBackend,
) -> None:
    def at_16(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return (library_linear if x.shape[-2] == 16 else by_place)(x, weight, bias)

    for relative_cost, taken in ((1.5, "all"), (50.0, "few")):
        ways = [way_of("few", at_16), way_of("all", library_linear)]
        ways[1].relative_cost = relative_cost
        use_exact_rows(plain, "on", ways=ways, choices=replace(ON_GPU, counts=(16, 64, 128, 256)))
        assert plain.product_way == taken


def test_counts_that_take_longer_than_larger_ones_are_left_out() -> None:
    plan = RowPlan((8, 16, 64, 128, 256))
    times = {8: 9.6, 16: 9.7, 64: 6.2, 128: 6.1, 256: 7.5}
    assert plan.without_slow(times) == RowPlan((64, 128, 256)), "a hundredth less is noise"
    assert plan.without_slow(dict.fromkeys(times, 1.0)) == plan


def test_a_count_is_timed_by_one_product_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[int, int]] = []

    def timed_ms(run: Callable[[], torch.Tensor], device: torch.device, num_turns: int) -> float:
        rows.append(tuple(run().shape))
        return float(rows[-1][0])

    monkeypatch.setattr(row_plan, "device_ms", timed_ms)
    kinds = [MatrixKind(64, 8, linear), MatrixKind(48, 24, linear)]
    times = products_ms(kinds, (16, 64), torch.float32, torch.device("cpu"))
    assert times == {16: 32.0, 64: 128.0} and rows == [(16, 8), (64, 8), (16, 24), (64, 24)]


def test_a_way_that_differs_by_count_is_used_at_the_cheapest_counts_that_agree(
    plain: PagedBackend,
) -> None:
    use_exact_rows(plain, "on", ways=[way_of("planted", by_count)], choices=ON_GPU)
    assert plain.row_plan == RowPlan((16, 64, 256, 384, 512)) and texts_unlike(plain) == 0


def test_a_norm_that_differs_by_count_is_found_by_whole_forwards(plain: PagedBackend) -> None:
    decoder: Any = plain.decoder
    finish = decoder._finish
    decoder._finish = lambda x, *given: finish(x, *given) * (1 + 2**-7 * (x.shape[0] == 128))
    use_exact_rows(plain, "on", ways=[way_of("library", library_linear)], choices=ON_GPU)
    assert plain.row_plan == RowPlan((8, 16, 32, 64, 256, 384, 512)) and texts_unlike(plain) == 0


@pytest.mark.parametrize("count", [4, 8, 16])
def test_trees_are_checked_where_a_pass_has_few_rows(plain: PagedBackend, count: int) -> None:
    """A tree stays in one pass: that of the check has no more nodes, either."""
    choices = replace(ON_GPU, counts=(count,))
    use_exact_rows(plain, "on", ways=[way_of("library", library_linear)], choices=choices)
    assert plain.row_plan == RowPlan((count,)) and plain.max_tree_nodes == count
    assert texts_unlike(plain) == 0


def test_a_context_too_short_for_the_check_is_served_not_reproducibly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_target(tmp_path / "model", "llama", max_context=10)
    with caplog.at_level(logging.WARNING, "outrider"):
        assert not load_target(directory).is_reproducible
    reason = "a context of 10 tokens is too short for the check"
    assert f"texts are not reproducible: {reason}" in caplog.text
    with pytest.raises(ModelError, match=f"--exact-rows on: {reason}"):
        load_target(directory, exact_rows="on")


def test_a_context_too_short_for_the_check_of_trees_is_served_without(tmp_path: Path) -> None:
    backend = load_target(make_tiny_target(tmp_path / "model", "llama", max_context=20), exact_rows="on")
    assert backend.is_reproducible and backend.max_tree_nodes == 0


def test_where_every_way_fails_on_refuses_with_each_reason_and_auto_serves_without(
    plain: PagedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("no such product")

    ways = [way_of("first", by_place), way_of("second", refused)]
    reasons = r"first: at no number of rows .*; second: no such product"
    planner = plain.planner
    with pytest.raises(ModelError, match=f"--exact-rows on: {reasons}; auto and off serve without"):
        use_exact_rows(plain, "on", ways=ways, choices=ON_GPU)
    with caplog.at_level(logging.WARNING, "outrider"):
        use_exact_rows(plain, "auto", ways=ways, choices=ON_GPU)
    assert re.search(f"texts are not reproducible: {reasons}", caplog.text)
    assert not plain.is_reproducible and plain.row_plan is None and plain.planner is planner
    assert ", not reproducible, " in describe_target(plain)
    assert not make_model_info(plain, ServeConfig()).is_reproducible


def test_splits_are_switched_off_by_torch_and_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, libraries = torch.backends.cuda.matmul, []
    monkeypatch.setattr(
        torch.backends.cuda,
        "preferred_blas_library",
        lambda name="cublas": libraries.append(name) or "cublas",
    )

    def settings() -> tuple[bool, bool]:
        name = "allow_bf16_reduced_precision_reduction"
        return getattr(matmul, name), getattr(matmul, f"{name}_split_k")

    before, way = settings(), UnsplitLibrary()
    way.enter(torch.bfloat16)
    assert settings() == (False, False) and libraries[-1] == "cublaslt"
    way.leave()
    assert settings() == before and libraries[-1] == "cublas"
    with pytest.raises(ModelError, match=r"no setting for it in torch.float32"):
        way.enter(torch.float32)
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(ModelError, match=r"torch 2.9.1 has no setting for it"):
        way.enter(torch.bfloat16)


def test_our_own_product_needs_triton_and_is_taken_back_where_it_fails(
    plain: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "outrider.kernels.product", None)
    with pytest.raises(ModelError, match="Triton is not installed"):
        OwnKernel().enter(torch.bfloat16)
    stand_in = types.SimpleNamespace(linear=by_place)
    monkeypatch.setitem(sys.modules, "outrider.kernels.product", stand_in)
    with pytest.raises(ModelError, match="our kernel: at no number of rows"):
        use_exact_rows(plain, "on", ways=[way_of("library", by_place), OwnKernel()], choices=ON_GPU)
    decoder: Any = plain.decoder
    assert {product.multiply for product in decoder._reader._products} == {library_linear}
    kinds = [[type(way) for way in product_ways(device)] for device in ("cpu", "cuda:1")]
    assert kinds == [[ProductWay], [ProductWay, UnsplitLibrary, OwnKernel]]


def texts_unlike(backend: PagedBackend) -> int:
    """Of four texts alone and the same four at once."""
    prompts, samplings = make_prompts(4)
    prompts = [[token % 500 for token in prompt] for prompt in prompts]
    expected = write_texts(backend, prompts, samplings, NUM_NEW)
    texts = [
        text
        for num_together in (1, 4)
        for text in write_texts(
            backend, prompts, samplings, NUM_NEW, expected=expected, num_together=num_together
        )
    ]
    return sum(a != b for a, b in zip(texts, expected * 2, strict=True))


def test_speculative_text_is_cloud_onlys(backend: PagedBackend) -> None:
    assert texts_unlike(backend) == 0


@pytest.fixture
def _nothing_planted() -> Iterator[None]:
    yield
    from benchmarks.reliability.planted import PlantedLinear

    PlantedLinear.count = 0


@pytest.mark.usefixtures("_nothing_planted")
def test_a_planted_product_is_left_out_by_the_check_and_found_by_the_texts(
    target_of: Callable[[str], Path],
) -> None:
    backend = load_target(target_of("qwen2"), dtype="bfloat16", kv_tokens=2048, exact_rows="off")
    plant(backend, 5)
    use_exact_rows(backend, "on")
    assert backend.row_plan is not None and 5 not in backend.row_plan.counts
    assert texts_unlike(backend) == 0
    plant(backend, backend.row_plan.fit(5))
    assert texts_unlike(backend) > 0, "the comparison of texts proves nothing"


def test_on_refuses_and_auto_says_so_where_rows_differ(
    target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library's attention in place of ours: its bits depend on how many queries one call has."""
    backend = load_target(target_of("llama"), dtype="bfloat16", kv_tokens=2048, exact_rows="off")
    planner = backend.planner
    assert not backend.is_reproducible
    monkeypatch.setattr(
        "outrider.cloud_verifier.backends.exact_rows.TiledPlanner", lambda *_: planner, raising=True
    )
    with pytest.raises(ModelError, match=r"--exact-rows on: attention over .* tokens depends"):
        use_exact_rows(backend, "on")
    with caplog.at_level(logging.WARNING, "outrider"):
        use_exact_rows(backend, "auto")
    assert "not reproducible" in caplog.text and ", not reproducible, " in describe_target(backend)
    assert not make_model_info(backend, ServeConfig()).is_reproducible
    assert backend.row_plan is None and backend.planner is planner and not backend.is_reproducible
    greedy = write_texts(backend, [TEXT[:20]], [SamplingParams(temperature=0.0)], 4)
    assert len(greedy[0]) == 4, "it serves all the same"


@pytest.mark.parametrize("has_numba", [True, False])
def test_attention_is_our_kernels_where_it_can_be_compiled(
    has_numba: bool, target_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "outrider.cloud_verifier.backends.attention.host"
    if not has_numba:
        monkeypatch.setitem(sys.modules, module, None)
    backend = load_target(target_of("llama"), kv_tokens=2048)
    assert backend.is_reproducible
    assert type(backend.planner).__name__ == ("HostPlanner" if has_numba else "TiledPlanner")
    assert texts_unlike(backend) == 0


def test_a_parameter_that_is_no_matrix_is_not_called_reproducible(target_of: Callable[[str], Path]) -> None:
    backend = load_target(
        target_of("llama"), dtype="bfloat16", kv_tokens=2048, exact_rows="off", decoder="transformers"
    )
    experts = torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
    backend.decoder._model.register_parameter("experts", experts)  # type: ignore[attr-defined]
    use_exact_rows(backend, "auto")
    assert not backend.is_reproducible and not isinstance(backend.planner, TiledPlanner)
