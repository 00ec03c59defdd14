"""Unlikelihood of repeats: which tokens end one, what the loss is, and that a target repeats less by it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.training.common.compute import Compute
from outrider.training.common.model import create_model
from outrider.training.draft.sampling import continue_rows
from outrider.training.target.train import TargetTrainer
from outrider.training.target.unlikelihood import RUN, UnlikelihoodConfig, repeat_loss, repeats
from tests.training.test_target import CONFIG, toy_stream


def test_a_token_ends_a_repeat_where_its_run_occurred_earlier_in_the_row() -> None:
    cycle = list(range(10)) * 2
    rows = torch.tensor([cycle, list(range(20))])
    marks = repeats(rows, first=0)
    assert marks[0].nonzero().flatten().tolist() == list(range(10 + RUN - 1, 20))
    assert not marks[1].any()
    assert torch.equal(repeats(rows, first=15), marks[:, 15:])


def test_the_loss_is_the_unlikelihood_of_the_marked_tokens_over_all_written_ones() -> None:
    torch.manual_seed(0)
    model = create_model(CONFIG.model)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    rows, first = torch.tensor([list(range(9)) * 3, list(range(27))]), 6
    probs = model(input_ids=rows[:, :-1], use_cache=False).logits.softmax(-1)
    chosen = probs.gather(-1, rows[:, 1:, None])[:, first - 1 :, 0]
    expected = -(1 - chosen).log()[repeats(rows, first)].sum() / chosen.numel()
    loss = repeat_loss(model, Compute(), rows, first)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_text_without_repeats_has_no_loss() -> None:
    loss = repeat_loss(create_model(CONFIG.model), Compute(), torch.arange(32)[None], 4)
    assert loss.item() == 0
    loss.backward()


def _repeated_share(start: float, out: Path) -> float:
    unlikelihood = UnlikelihoodConfig(start=start, prompt=4, tokens=44, rows=8, step_rows=4)
    config = replace(CONFIG, tokens=64 * 150, unlikelihood=unlikelihood)
    trainer = TargetTrainer(config, toy_stream(), toy_stream(2000), out)
    assert trainer.train() is not None
    prompts = torch.from_numpy(np.arange(8)[:, None] + np.arange(4)) % 8
    return float(repeats(continue_rows(trainer.model, prompts, 44, temperature=0.0), first=4).float().mean())


@pytest.mark.slow
@pytest.mark.ci
def test_a_target_trained_with_it_repeats_less(tmp_path: Path) -> None:
    """The toy corpus is a cycle: a target that knows it repeats it for ever."""
    without = _repeated_share(2.0, tmp_path / "without")
    assert without == pytest.approx((44 - 12) / 44, abs=0.15)
    assert _repeated_share(0.3, tmp_path / "with") < 0.7 * without
