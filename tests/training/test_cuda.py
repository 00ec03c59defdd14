"""The same recipe on a GPU, in bfloat16."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.training.common.compute import Compute
from outrider.training.draft.distiller import Distiller
from outrider.training.target.train import TargetTrainer
from tests.training.test_pair import CONFIG as DRAFT_CONFIG
from tests.training.test_target import CONFIG, toy_stream

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_pair_is_trained_resumed_and_distilled_on_cuda(is_compiled: bool, tmp_path: Path) -> None:
    compute = Compute("cuda", is_compiled)
    config = replace(CONFIG, tokens=64 * 60, compute=compute)
    first = TargetTrainer(config, toy_stream(), toy_stream(2000), tmp_path)
    assert first.train() is not None
    second = TargetTrainer(replace(config, tokens=64 * 90), toy_stream(), toy_stream(2000), tmp_path)
    assert second.resume()
    figures = second.train()
    assert figures is not None and figures["validation_loss"]["last"] < 2.5
    draft = replace(DRAFT_CONFIG, tokens=64 * 60, draft_share=0.3, compute=compute)
    distiller = Distiller(draft, tmp_path, toy_stream(), tmp_path / "draft")
    distilled = distiller.train()
    assert distilled is not None and distilled["loss"] < 0.7 * distiller.history[0]["loss"]


class ShortCompute(Compute):
    """A CPU that trains as a GPU does: slow, but the same dtypes in the same places."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


@pytest.mark.slow
@pytest.mark.ci
def test_the_bfloat16_path_trains_and_distils_on_a_cpu_too(tmp_path: Path) -> None:
    config = replace(CONFIG, tokens=64 * 60, compute=ShortCompute())
    figures = TargetTrainer(config, toy_stream(), toy_stream(2000), tmp_path).train()
    assert figures is not None and figures["validation_loss"]["last"] < 2.5
    draft = replace(DRAFT_CONFIG, tokens=64 * 60, draft_share=0.3, compute=ShortCompute())
    distiller = Distiller(draft, tmp_path, toy_stream(), tmp_path / "draft")
    assert distiller.target.dtype == torch.bfloat16
    assert distiller.model.dtype == torch.float32
    distilled = distiller.train()
    assert distilled is not None and distilled["loss"] < 0.7 * distiller.history[0]["loss"]


def test_a_missing_cuda_device_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA device"):
        Compute("cuda")
