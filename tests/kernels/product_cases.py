"""The product kernel under Triton's interpreter, on CPU tensors: its values, its bits, and a target through it.

Run by test_triton_kernels.py in a process of their own: Triton asks how it is to run when it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import make_tiny_target
from torch.nn.functional import linear as library_linear

from benchmarks.engine_texts import write_texts
from outrider.cloud_verifier.backends.exact_rows import use_exact_rows
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.products.row_plan import ON_GPU, MatrixKind, find_row_plan
from outrider.cloud_verifier.backends.products.ways import Linear, OwnKernel, ProductWay
from outrider.common.errors import ModelError
from outrider.common.types import SamplingParams
from outrider.kernels import device, reference
from outrider.kernels.product import ROWS, linear

CPU = torch.device("cpu")
# Of the largest number: the sums are right in float32, and rounded once; to bfloat16 the interpreter cuts off.
MAX_ERROR = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
SHAPES = ((1, 64, 64), (5, 100, 70), (ROWS + 3, 200, 130))  # rows, inputs, outputs


def tensors(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_inputs)
    shapes = (num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_float64(
    shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = tensors(*shape, dtype)
    found = linear(x, weight, bias if has_bias else None)
    expected = reference.linear(
        *(each.float().numpy() for each in (x, weight)), bias.float().numpy() * has_bias
    )
    assert found.dtype == dtype
    assert np.abs(found.double().numpy() - expected).max() <= MAX_ERROR[dtype] * np.abs(expected).max()


def test_a_weight_may_be_transposed_and_rows_may_have_more_dimensions() -> None:
    x, weight, bias = tensors(6, 100, 70, torch.float32)
    whole = linear(x, weight, bias)
    assert torch.equal(linear(x, weight.t().contiguous().t(), bias), whole)
    assert torch.equal(linear(x.view(2, 3, 100), weight, bias), whole.view(2, 3, 70))


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    """Alone, in every place of several tiles, and beside other rows."""
    x, weight, bias = tensors(2 * ROWS + 9, 150, 70, dtype)
    whole = linear(x, weight, bias)
    for row in (0, 1, ROWS - 1, ROWS, 2 * ROWS + 8):
        assert torch.equal(linear(x[row : row + 1], weight, bias)[0], whole[row])
        assert torch.equal(linear(x[row : row + 5], weight, bias)[0], whole[row])
    assert torch.equal(linear(x.flip(0), weight, bias).flip(0), whole)
    others = torch.cat((x[:7], 1000 * x[7:]))
    assert torch.equal(linear(others, weight, bias)[:7], whole[:7])


def test_a_kernel_is_launched_on_its_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, which is the first unless it is told."""
    entered: list[torch.Tensor] = []

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x, weight, _ = tensors(1, 64, 64, torch.float32)
    linear(x, weight)
    assert entered == [x]
    ones, keys = torch.ones(1), torch.zeros((1, 4), dtype=torch.int64)
    device.gumbel_argmax(x, ones, -torch.inf * ones, keys)
    assert entered == [x, x]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_at_the_start_finds_the_same_bits_at_every_count(dtype: torch.dtype) -> None:
    kind = MatrixKind(300, 70, lambda weight: lambda x: linear(x, weight))
    plan = find_row_plan([kind], dtype, CPU, ON_GPU)
    assert plan is not None and plan.counts == ON_GPU.counts


# ------------------------------------------------------------------------------- a target through it


class Planted(ProductWay):
    """The library's product, in another order of summation for every third row."""

    def enter(self, dtype: torch.dtype) -> Linear:
        def by_place(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            out, half = library_linear(x, weight, bias), x.shape[-1] // 2
            parts = (x[..., :half], weight[:, :half], None), (x[..., half:], weight[:, half:], bias)
            out[..., ::3, :] = sum(library_linear(*part) for part in parts)[..., ::3, :]
            return out

        return by_place


@pytest.mark.parametrize(
    "decoder", ["cuda", *(pytest.param(each, marks=pytest.mark.slow) for each in ("lean", "transformers"))]
)
def test_a_target_whose_library_fails_writes_the_same_texts_through_the_kernel(
    decoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = "gpt2" if decoder == "transformers" else "llama"  # gpt2's weights are transposed
    directory = make_tiny_target(tmp_path / arch, arch, num_layers=1, hidden=32, max_context=101)
    backend = load_target(directory, dtype="bfloat16", decoder=decoder, kv_tokens=512, exact_rows="off")
    with pytest.raises(ModelError, match="at no number of rows"):
        use_exact_rows(backend, "on", ways=(Planted(),))
    use_exact_rows(backend, "on", ways=(Planted(), OwnKernel()), choices=replace(ON_GPU, counts=(8, 16)))
    assert backend.is_reproducible and backend.product_way == "our kernel"
    assert backend.row_plan is not None and backend.row_plan.counts == (8, 16)
    prompts, samplings = [[5, 6, 7], [9, 8]], [SamplingParams(temperature=t, seed=3) for t in (0.0, 0.9)]
    alone = [write_texts(backend, [p], [s], 3)[0] for p, s in zip(prompts, samplings, strict=True)]
    assert write_texts(backend, prompts, samplings, 3, expected=alone, num_together=2) == alone
