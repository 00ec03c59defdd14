"""What the stages compare: ways to attend, to multiply, to run a decoder and to promise equal texts.

A new way is a line here: the stages measure every line alike, and a line says what must be true of it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.shape import ModelWeights, Shape, own_config
from benchmarks.gpu_check.stand_ins import RunAgain
from outrider.cloud_verifier.backends.attention.plan import AttentionPlanner
from outrider.cloud_verifier.backends.attention.sdpa import SdpaPlanner
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.cuda.graphs import Capture, CudaCapture
from outrider.cloud_verifier.backends.facts import TargetFacts
from outrider.cloud_verifier.backends.loading import make_backend
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.products.ways import OwnKernel, ProductWay, UnsplitLibrary
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder
from outrider.common.errors import ModelError
from outrider.models import EMBEDDED


class NotHere(Exception):
    """Is raised where this machine or its packages do not offer a variant."""


@dataclass(frozen=True)
class Attention:
    """Makes a planner and says which block size it wants. With `has_exact_rows` a row's bits must not change
    with its neighbours or its number of queries."""

    make: Callable[[Shape, int, torch.dtype, torch.device], tuple[AttentionPlanner, int]]
    has_exact_rows: bool = False


@dataclass(frozen=True)
class Product:
    """Multiplies some rows in one of the verifier's ways: all at once (0), or padded to a multiple of `padded_rows`,
    hence in one shape.

    With `has_exact_rows` a row's bits must not change with their number; what `is_tried` is put through the
    verifier's own check at the start, in this order.
    """

    make_way: Callable[[], ProductWay] = ProductWay
    padded_rows: int = 0
    has_exact_rows: bool = False
    is_tried: bool = False


@dataclass(frozen=True)
class Decoder:
    """Puts a model behind a backend. `max_calls` bounds its dispatcher calls a step, views left out, and `max_ratio`
    its time in reads of all weights."""

    make: Callable[[Any, TargetFacts, int], PagedBackend]
    max_ratio: float | None = None
    max_calls: int | None = None


@dataclass(frozen=True)
class Texts:
    """Says in which dtype and with which `--exact-rows` texts are written, and whether they must equal cloud-only's."""

    dtype: str
    exact_rows: str
    is_exact: bool


def _make_sdpa(
    shape: Shape, max_context: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionPlanner, int]:
    num_groups = shape.num_heads // shape.num_kv_heads
    return SdpaPlanner(16, max_context, num_groups, dtype, device), 16


def _make_paged(
    shape: Shape, max_context: int, dtype: torch.dtype, device: torch.device
) -> tuple[AttentionPlanner, int]:
    if importlib.util.find_spec("triton") is None:
        raise NotHere("Triton is not installed")
    from outrider.cloud_verifier.backends.attention.paged import PagedPlanner

    return PagedPlanner(16, shape.num_heads // shape.num_kv_heads, device), 16


def _make_transformers(model: Any, facts: TargetFacts, kv_tokens: int) -> PagedBackend:
    return make_backend(TransformersDecoder(model), facts, kv_tokens=kv_tokens, exact_rows="off")


def _make_own(
    model: Any,
    facts: TargetFacts,
    kv_tokens: int,
    *,
    has_graphs: bool,
    exact_rows: str = "off",
    has_fp8_kv: bool = False,
) -> PagedBackend:
    facts = replace(facts, has_fp8_kv=has_fp8_kv)
    capture: Capture | None = None
    if has_graphs:
        capture = RunAgain() if facts.device == "cpu" else CudaCapture(torch.device(facts.device))
    decoder = CudaDecoder(own_config(model), ModelWeights(model), capture=capture)
    try:
        return make_backend(decoder, facts, kv_tokens=kv_tokens, exact_rows=exact_rows)
    except ModelError as error:
        raise NotHere(str(error)) from error


@dataclass(frozen=True)
class Served:
    """Holds flags of a verifier, the packages that they need, and the draft sources that it has with them.

    Heads of the kind `trained` are trained for it first, for some seconds.
    """

    flags: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    draft_sources: tuple[str, ...] = ()
    trained: str = ""


ATTENTIONS = {"sdpa": Attention(_make_sdpa), "paged": Attention(_make_paged, has_exact_rows=True)}
PRODUCTS = {
    "default": Product(is_tried=True),
    "padded": Product(padded_rows=128, has_exact_rows=True),
    "unsplit": Product(UnsplitLibrary, is_tried=True),
    "unsplit_padded": Product(UnsplitLibrary, padded_rows=128, has_exact_rows=True),
    "persistent": Product(OwnKernel, has_exact_rows=True, is_tried=True),
}
# Those with exact rows come last: they change how the library multiplies in this process.
DECODERS = {
    "graphs": Decoder(partial(_make_own, has_graphs=True), max_ratio=1.4),
    "eager": Decoder(partial(_make_own, has_graphs=False), max_calls=400),
    "transformers": Decoder(_make_transformers),
    "exact": Decoder(partial(_make_own, has_graphs=True, exact_rows="on")),
    "exact_fp8_kv": Decoder(partial(_make_own, has_graphs=True, exact_rows="on", has_fp8_kv=True)),
}
TEXTS = {
    "float32": Texts("float32", "auto", is_exact=True),
    "bfloat16": Texts("bfloat16", "off", is_exact=False),
    "bfloat16_exact": Texts("bfloat16", "on", is_exact=True),
}
HEADS = ("medusa", "hydra")
SERVED = {
    "heads": Served(
        (*(flag for head in HEADS for flag in ("--heads", str(EMBEDDED / "heads" / head))), "--lookahead"),
        draft_sources=(*HEADS, "lookahead"),
    ),
    "eagle": Served(trained="eagle", draft_sources=("eagle",)),
    "fp8_kv": Served(("--kv-dtype", "fp8")),
    "nf4": Served(("--quantize", "nf4"), ("bitsandbytes", "accelerate")),
}
