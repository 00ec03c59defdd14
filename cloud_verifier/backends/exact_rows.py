"""Makes a loaded target's rows independent of the rows beside them, and checks that they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import linear

from outrider.cloud_verifier.backends.attention.packing import PackedSequence
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner, AttentionRule
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.attention.tiled import TiledPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, Logits, open_sequence
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.products.packed import MANY_ROWS
from outrider.cloud_verifier.backends.products.row_plan import (
    ON_CPU,
    ON_GPU,
    RowChoices,
    RowPlan,
    find_row_plan,
    products_ms,
)
from outrider.cloud_verifier.backends.products.ways import ProductWay, product_ways
from outrider.common.errors import ModelError
from outrider.kernels.kv_pool import KVPool

logger = logging.getLogger(__name__)

EXACT_ROWS = ("auto", "on", "off")
PROMPT_TOKENS, MAX_DECODED, STEP = 9, 10, 5
# One-row forwards of the check: of a large target fewer, which differ sooner. Together they read so many bytes of
# weights at most, which takes about half a second, or there are as few as these.
MIN_DECODED, MAX_READ_BYTES = 4, {"cpu": 10e9, "cuda": 1e12}
BESIDE = (3, 14)  # tokens that two other sequences feed in the same forward
# Lengths of the attention check: around the ends of the tiled planner's spans, and far from them.
LENGTHS = (1, 2, 18, 41, 64, 65, 101, 128, 129, 201, 256, 257, 301, 512, 513, 600)
MAX_QUERIES = 5


@torch.inference_mode()
def use_exact_rows(
    backend: PagedBackend,
    mode: str,
    *,
    ways: Sequence[ProductWay] | None = None,
    choices: RowChoices | None = None,
) -> None:
    """Sets the backend's `row_plan`, products, attention and `is_reproducible`, as `--exact-rows` (`mode`) says.

    Of `ways` to multiply the cheapest is taken that passes all checks, with its cheapest of the `choices` of row
    counts; both are those of the backend's device where they are None. Raises `ModelError` where `mode` is "on" and the
    rows of this target depend on one another in every way.
    """
    if mode == "off":
        return
    is_on_cpu = backend.device == "cpu"
    if mode == "auto" and is_on_cpu and backend.dtype == "float32" and has_equal_rows(backend):
        backend.is_reproducible = True
        return
    ways, choices = ways or product_ways(backend.device), choices or (ON_CPU if is_on_cpu else ON_GPU)
    errors: list[tuple[str, Exception]] = []
    for way, plan in _find_plans(backend, ways, choices, errors):
        try:
            _use_way(backend, way, plan, choices)
        except (ModelError, RuntimeError) as error:
            errors.append((way.name, error))
        else:
            logger.debug(
                "exact rows by %s with %s; not by %s", way.name, backend.row_plan, errors or "others"
            )
            return
    reason = "; ".join(f"{error}" if len(ways) == 1 else f"{name}: {error}" for name, error in errors)
    if mode == "on":
        *_, (_, cause) = errors
        raise ModelError(
            f"--exact-rows on: {reason}; auto and off serve without, not reproducibly"
        ) from cause
    logger.warning("exact rows are off, texts are not reproducible: %s", reason)


def _find_plans(
    backend: PagedBackend,
    ways: Sequence[ProductWay],
    choices: RowChoices,
    errors: list[tuple[str, Exception]],
) -> list[tuple[ProductWay, RowPlan]]:
    """Returns ways to multiply, the cheapest first, with the plan of each; adds to `errors` why others have none.

    Ways after one that cannot be cheaper are not tried.
    """
    found: list[tuple[float, ProductWay, RowPlan]] = []
    for way in ways:
        try:
            _enter(backend, way)
            try:
                plan = _find_plan(backend, choices)
            finally:
                _leave(backend, way)
        except (ModelError, RuntimeError) as error:  # the latter: of a product that the library refuses
            errors.append((way.name, error))
            continue
        found.append((way.relative_cost * choices.cost(plan), way, plan))
        if found[-1][0] <= choices.cost(RowPlan(choices.counts)):
            break
    return [(way, plan) for _, way, plan in sorted(found, key=lambda each: each[0])]


def _use_way(backend: PagedBackend, way: ProductWay, plan: RowPlan, choices: RowChoices) -> None:
    """Sets the backend's plan with this way to multiply. Raises an error, all as before, where rows differ."""
    planner, has_trees = backend.planner, backend.has_trees
    _enter(backend, way)
    try:
        backend.row_plan = _prepare(backend, plan, choices)
    except BaseException:
        _leave(backend, way)
        backend.row_plan, backend.planner, backend.has_trees = None, planner, has_trees
        raise
    backend.is_reproducible, backend.product_way = True, way.name


def _enter(backend: PagedBackend, way: ProductWay) -> None:
    """Multiplies the decoder's matrices in a way from now on. Raises an error, all as before, where it cannot."""
    multiply = way.enter(getattr(torch, backend.dtype))
    try:
        backend.decoder.use_linear(multiply)
    except BaseException:
        _leave(backend, way)
        raise


def _leave(backend: PagedBackend, way: ProductWay) -> None:
    way.leave()
    backend.decoder.use_linear(linear)


def has_equal_rows(backend: PagedBackend) -> bool:
    """Returns whether a row's bits depend on no other row as the target is, at any number of rows.

    A CPU's library has few kernels, by few sizes; a GPU's has so many that a sample of the counts proves nothing.
    """
    choices = replace(ON_CPU, counts=(1, *ON_CPU.counts))
    try:
        if choices.tried(backend.decoder.matrix_kinds()) != choices.counts:
            return False
        check_attention(backend)
        check_forwards(backend)
        check_trees(backend)
        plan = _find_plan(backend, choices)
    except ModelError:
        return False
    return plan.counts == choices.counts


def _prepare(backend: PagedBackend, plan: RowPlan, choices: RowChoices) -> RowPlan:
    """Returns what of the plan is used. Raises `ModelError` where rows differ with it."""
    facts, device = backend.facts, torch.device(backend.device)
    if isinstance(backend.planner, SdpaPlanner):
        backend.planner = _host_planner(backend) or TiledPlanner(
            backend.blocks.block_size,
            facts.num_heads // facts.num_kv_heads,
            getattr(torch, backend.dtype),
            device,
        )
    if choices.has_other_kernels:
        plan = _agreeing(backend, plan, choices)
    if device.type == "cuda":
        kinds = backend.decoder.matrix_kinds()
        plan = plan.without_slow(products_ms(kinds, plan.counts, getattr(torch, backend.dtype), device))
    own = range(1, backend.decoder.most_own_rows + 1)  # all with the same bits, the library's for `MANY_ROWS`
    if not set(plan.counts).isdisjoint({*own, MANY_ROWS}):
        plan = RowPlan(tuple(sorted({*plan.counts, *own})))
    backend.row_plan = plan
    check_attention(backend)
    check_forwards(backend)
    try:
        check_trees(backend)
    except ModelError as error:
        backend.has_trees = False
        logger.warning("drafts that are trees are refused: %s", error)
    return plan


def _host_planner(backend: PagedBackend) -> AttentionPlanner | None:
    """Returns our own attention on a CPU, None where it does not read such KV or cannot be compiled."""
    if backend.device != "cpu" or backend.kv_dtype != "float32":
        return None
    try:
        from outrider.cloud_verifier.backends.attention.host import HostPlanner
    except Exception as error:  # no numba, one that does not fit numpy, a machine it cannot compile for
        logger.debug("attention is the library's: %s", error)
        return None
    return HostPlanner(backend.blocks.block_size, torch.get_num_threads())


def _find_plan(backend: PagedBackend, choices: RowChoices) -> RowPlan:
    kinds = backend.decoder.matrix_kinds()
    plan = find_row_plan(kinds, getattr(torch, backend.dtype), torch.device(backend.device), choices)
    if plan is None:
        raise ModelError("at no number of rows do a matrix's rows have the same bits in every place")
    return plan


def _agreeing(backend: PagedBackend, plan: RowPlan, choices: RowChoices) -> RowPlan:
    """Returns the cheapest of the plan's counts at which whole forwards, too, give tokens the same logits."""
    text = [
        (31 * i * i + 7 * i + 1) % backend.num_tokens for i in range(min(PROMPT_TOKENS, backend.max_context))
    ]
    bits = {}
    try:
        for count in plan.counts:
            backend.row_plan = RowPlan((count,))
            bits[count] = _score(backend, text, 0, STEP).tobytes()
    finally:
        backend.num_forwards = backend.num_query_rows = 0
    agreeing = choices.cheapest(bits)
    assert agreeing is not None, "a plan has counts"
    return agreeing


def check_forwards(backend: PagedBackend) -> None:
    """Raises `ModelError` unless tokens have the same logits decoded alone, verified, prefilled and beside
    others."""
    text = _text(backend, MAX_DECODED, backend.max_context)
    try:
        alone = _decode_alone(backend, text)
        _compare(_score(backend, text, PROMPT_TOKENS, len(text)), alone, "verified at once")
        _compare(_score(backend, text, 0, len(text))[PROMPT_TOKENS:], alone, "prefilled at once")
        beside = _score(backend, text, PROMPT_TOKENS, STEP, BESIDE)
        _compare(beside, alone, f"verified {STEP} at a time beside other sequences")
    finally:
        backend.num_forwards = backend.num_query_rows = 0


def check_trees(backend: PagedBackend) -> None:
    """Raises `ModelError` unless the tokens of a path through a tree have the logits that they have decoded alone, and
    so has the token after the path."""
    num_decoded = min(MAX_DECODED, backend.max_tree_nodes // 2 + 1)  # two nodes for each but the last
    text = _text(backend, num_decoded, backend.max_context // 2)
    try:
        alone = _decode_alone(backend, text)
        path, last = text[PROMPT_TOKENS:-1], text[-1]
        # Beside each of its tokens there is another one, which comes first.
        others = [(token_id + 1) % backend.num_tokens for token_id in path]
        tokens = [token_id for pair in zip(others, path, strict=True) for token_id in pair]
        parents = [2 * (node // 2) - 1 for node in range(len(tokens))]
        nodes = range(1, len(tokens), 2)
        with open_sequence(backend) as sequence:
            backend.forward([ForwardItem(sequence, text[:PROMPT_TOKENS], 0)])
            rows = backend.forward([ForwardItem(sequence, tokens, len(tokens), parents)])[1::2].copy()
            _compare(rows, alone[: len(path)], "in a tree")
            backend.keep(sequence, PROMPT_TOKENS, nodes)
            _compare(backend.forward([ForwardItem(sequence, [last], 1)]), alone[len(path) :], "after a tree")
    finally:
        backend.num_forwards = backend.num_query_rows = 0


def _text(backend: PagedBackend, num_decoded: int, most: int) -> list[int]:
    """Returns a prompt and tokens after it, `num_decoded` or fewer of a large target, at most `most` together. Raises
    `ModelError` where that leaves none."""
    num_read = int(MAX_READ_BYTES[backend.device.partition(":")[0]] / backend.num_weight_bytes)
    length = min(PROMPT_TOKENS + min(num_decoded, max(MIN_DECODED, num_read)), most)
    if length < PROMPT_TOKENS + 2:
        raise ModelError(f"a context of {backend.max_context} tokens is too short for the check")
    return [(31 * i * i + 7 * i + 1) % backend.num_tokens for i in range(length)]


def _decode_alone(backend: PagedBackend, text: Sequence[int]) -> Logits:
    rows = []
    with open_sequence(backend) as sequence:
        backend.forward([ForwardItem(sequence, text[:PROMPT_TOKENS], 0)])
        for token_id in text[PROMPT_TOKENS:]:
            rows.append(backend.forward([ForwardItem(sequence, [token_id], 1)]).copy())
    return np.concatenate(rows)


def _score(
    backend: PagedBackend, text: Sequence[int], start: int, step: int, beside: Sequence[int] = ()
) -> Logits:
    """Returns the logits after text[start:], fed `step` tokens at a time in the middle of `beside`."""
    rows = []
    with open_sequence(backend) as sequence:
        if start:
            backend.forward([ForwardItem(sequence, text[:start], 0)])
        for first in range(start, len(text), step):
            fed = text[first : first + step]
            with ExitStack() as opened:
                others = [
                    ForwardItem(opened.enter_context(open_sequence(backend)), text[-count:], 1)
                    for count in beside
                ]
                logits = backend.forward([*others[:1], ForwardItem(sequence, fed, len(fed)), *others[1:]])
            num_before = len(others[:1])
            rows.append(logits[num_before : num_before + len(fed)].copy())
    return np.concatenate(rows)


def _compare(found: Logits, alone: Logits, how: str) -> None:
    is_equal = (found == alone).all(axis=1)
    if not is_equal.all():
        raise ModelError(
            f"{int((~is_equal).sum())} of {len(alone)} tokens have other logits {how} than alone"
        )


@torch.inference_mode()
def check_attention(backend: PagedBackend) -> None:
    """Raises `ModelError` unless a query's attention is the same alone, among all of its sequence, and beside
    others."""
    facts, block_size, planner = backend.facts, backend.blocks.block_size, backend.planner
    lengths = [length for length in LENGTHS if length <= facts.max_context]
    blocks = list(range(-(-lengths[-1] // block_size)))
    pool = (len(blocks), block_size, facts.num_kv_heads, facts.head_dim)
    generator = torch.Generator().manual_seed(0)
    keys, values, query = (
        torch.randn(shape, generator=generator).to(device=backend.device, dtype=getattr(torch, facts.dtype))
        for shape in (pool, pool, (facts.num_heads, lengths[-1], facts.head_dim))
    )
    key_pool, value_pool = (KVPool.holding(each, is_fp8=facts.has_fp8_kv) for each in (keys, values))

    def sequence(length: int, num_queries: int, start: int = 0, is_run: bool = True) -> PackedSequence:
        return PackedSequence(start, num_queries, length, blocks[: -(-length // block_size)], is_run)

    def attend(rule: AttentionRule, sequences: Sequence[PackedSequence]) -> torch.Tensor:
        rows = [row for each in sequences for row in range(each.past, each.length)]
        return planner.plan(sequences)(query[:, rows], key_pool, value_pool, rule)

    for rule in backend.rules:
        whole = attend(rule, [sequence(lengths[-1], lengths[-1])])
        several, start = [], 0
        for length in lengths:
            alone = attend(rule, [sequence(length, 1)])[0]
            if not torch.equal(alone, whole[length - 1]):
                raise ModelError(f"attention over {length} tokens depends on the number of queries")
            several.append(sequence(length, min(MAX_QUERIES, length), start, is_run=False))
            start = several[-1].stop
        found = attend(rule, several)
        for each in several:
            if not torch.equal(found[each.start : each.stop], whole[each.past : each.length]):
                raise ModelError(f"attention over {each.length} tokens depends on the sequences beside it")
