"""CudaDecoder through its Triton kernels and paged attention under the interpreter, its steps replayed as graphs.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import make_tiny_target
from torch.nn.functional import linear

from benchmarks.gpu_check.stand_ins import RunAgain
from outrider.cloud_verifier.backends.attention.paged import PagedPlanner
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.decoder_config import make_decoder_config, with_defaults
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.products.row_plan import ON_GPU, RowPlan
from outrider.cloud_verifier.backends.products.ways import OwnKernel
from outrider.cloud_verifier.backends.weights import Weights
from outrider.kernels import layers

TEXT = [(37 * i + 11) % 200 for i in range(100)]
PARENTS = (-1, 0, 1, 0, -1)
SIZES: dict[str, Any] = {"hidden": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}


def through_kernels(directory: Path, capture: RunAgain, kv_dtype: str = "auto") -> PagedBackend:
    """A target as on CUDA, in float32."""
    backend = load_target(directory, decoder="cuda", kv_dtype=kv_dtype, kv_tokens=512, exact_rows="off")
    fields = with_defaults(json.loads((directory / "config.json").read_text()))
    config = fields and make_decoder_config(fields)
    assert config is not None
    with Weights(directory, "cpu", torch.float32) as weights:
        backend.use_decoder(CudaDecoder(config, weights, layers, capture))
    backend.planner = PagedPlanner(16, 2, torch.device("cpu"), upload=backend.inputs and backend.inputs.add)
    backend.has_paged_kernel = True
    return backend


def steps_of(backend: PagedBackend) -> list[Logits]:
    """A prefill, then steps of two sequences, which grow, are cut back, and once carry a tree."""
    sequences, found = [backend.new_sequence() for _ in range(2)], list[Logits]()

    def step(*num_new: int, parents: Sequence[int] = ()) -> None:
        items = [
            ForwardItem(each, TEXT[each.length : each.length + num], num, parents if num == 5 else ())
            for each, num in zip(sequences, num_new, strict=True)
        ]
        found.append(np.array(backend.forward(items)))

    step(13, 2)
    for number in range(4):
        step(5, 1)
        backend.truncate(sequences[0], 14 + number)
    step(1, 5, parents=PARENTS)
    backend.keep(sequences[1], sequences[1].length - 5, (0, 3))
    step(1, 1)
    for each in sequences:
        backend.close(each)
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_replayed_steps_have_the_logits_of_the_decoder_for_a_cpu(tmp_path: Path, kv_dtype: str) -> None:
    num_layers = 2 if kv_dtype == "auto" else 1  # the second one has the window
    directory = make_tiny_target(
        tmp_path / "model", "qwen3", num_layers=num_layers, max_context=101, **SIZES, **WINDOW
    )
    expected = steps_of(load_target(directory, kv_dtype=kv_dtype, kv_tokens=512, exact_rows="off"))
    capture = RunAgain()
    backend = through_kernels(directory, capture, kv_dtype)
    found = steps_of(backend)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        # A key's last bit may make it another number of FP8.
        most = 2e-4 if kv_dtype == "auto" else 2e-2
        np.testing.assert_allclose(ours, theirs, atol=most, err_msg=f"step {number}")
    assert capture.num_captures and capture.num_replays >= 3, vars(capture)
    backend.check_integrity()
    for pool in backend.memory.tensors:
        if pool.is_floating_point():
            pool.fill_(torch.nan)  # as others may leave it
    for ours, theirs in zip(steps_of(backend), found, strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.slow  # 8 s
def test_exact_rows_are_found_through_graphs_of_the_products_that_are_tried(tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path / "model", "qwen3", num_layers=1, max_context=101, **SIZES)
    capture = RunAgain()
    backend = through_kernels(directory, capture)
    sequence = backend.new_sequence()
    for _ in range(2):  # captured when a size comes again
        backend.forward([ForwardItem(sequence, TEXT[:4], 4)])
    backend.close(sequence)
    graphs = backend.decoder._graphs  # type: ignore[attr-defined]
    assert graphs._graphs
    backend.decoder.use_linear(linear)
    assert not graphs._graphs, "they have the products of another way in them"
    before = capture.num_captures
    use_exact_rows(backend, "on", ways=(OwnKernel(),), choices=replace(ON_GPU, counts=(8, 16)))
    assert backend.is_reproducible and backend.has_trees and capture.num_captures > before
    assert backend.row_plan == RowPlan((8, 16)) and isinstance(backend.planner, PagedPlanner)
