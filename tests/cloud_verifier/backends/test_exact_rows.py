"""A token's logits have the same bits whatever shares its forward, or the target is not called reproducible."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.exact_rows import make_prompts
from benchmarks.reliability.planted import plant
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.row_plan import COUNTS, MatrixKind, Product, RowPlan, find_row_plan
from outrider.cloud_verifier.backends.tiled import TiledPlanner, span_end
from outrider.cloud_verifier.backends.transformers_backend import Feed, TransformersBackend, split_feeds
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.kv.blocks import BlockTable
from outrider.cloud_verifier.server.cli import describe_target
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams

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
def backend(request: pytest.FixtureRequest, target_of: Callable[[str], Path]) -> TransformersBackend:
    arch, dtype, decoder = request.param
    return load_target(target_of(arch), dtype=dtype, decoder=decoder, kv_tokens=2048, exact_rows="on")


def score(backend: TransformersBackend, fed: list[int], num_rows: int, start: int = 0) -> Logits:
    """The last rows after TEXT[:start] and `fed`."""
    sequence = backend.new_sequence()
    if start:
        backend.forward([ForwardItem(sequence, TEXT[:start], 0)])
    rows = backend.forward([ForwardItem(sequence, fed, num_rows)]).copy()
    backend.close(sequence)
    return rows


def test_rows_are_the_same_in_every_forward(backend: TransformersBackend) -> None:
    """Longer than a plan's largest count, over several spans of positions."""
    assert backend.is_reproducible and ", reproducible, " in describe_target(backend, "")
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
    backend: TransformersBackend,
) -> None:
    whole = score(backend, TEXT, len(TEXT))
    assert backend.row_plan is not None and len(TEXT) > backend.row_plan.most
    for pool in backend._pools:
        pool.fill_(float("nan"))
    assert np.array_equal(score(backend, TEXT, len(TEXT)), whole)


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
    assert plan is not None and plan.counts == tuple(count for count in COUNTS if count != 12)


def test_where_every_count_differs_all_is_padded_to_one() -> None:
    def make(weight: torch.Tensor) -> Product:
        return lambda x: linear(weight)(x) + x.shape[0]

    plan = find_row_plan([MatrixKind(32, 8, make)], torch.float32, torch.device("cpu"))
    assert plan is not None and len(plan.counts) == 1
    assert plan.cost == min(RowPlan((count,)).cost for count in COUNTS)


def texts_unlike(backend: TransformersBackend) -> int:
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


def test_speculative_text_is_cloud_onlys(backend: TransformersBackend) -> None:
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
    with caplog.at_level(logging.WARNING):
        use_exact_rows(backend, "auto")
    assert "not reproducible" in caplog.text and ", not reproducible, " in describe_target(backend, "")
    assert not make_model_info(backend, ServeConfig()).is_reproducible
    assert backend.row_plan is None and backend.planner is planner and not backend.is_reproducible
    greedy = write_texts(backend, [TEXT[:20]], [SamplingParams(temperature=0.0)], 4)
    assert len(greedy[0]) == 4, "it serves all the same"


def test_a_parameter_that_is_no_matrix_is_not_called_reproducible(target_of: Callable[[str], Path]) -> None:
    backend = load_target(
        target_of("llama"), dtype="bfloat16", kv_tokens=2048, exact_rows="off", decoder="transformers"
    )
    experts = torch.nn.Parameter(torch.zeros(2, 3, 4), requires_grad=False)
    backend.decoder._model.register_parameter("experts", experts)  # type: ignore[attr-defined]
    use_exact_rows(backend, "auto")
    assert not backend.is_reproducible and not isinstance(backend.planner, TiledPlanner)
