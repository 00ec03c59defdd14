"""Training an EAGLE-3 draft: its steps compute what drafting computes, it learns, and what it writes is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import make_tiny_target

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.eagle import EagleHead, EagleSequence
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.common.types import SamplingParams
from outrider.training.common.schedule import Phase
from outrider.training.heads.eagle import EagleConfig, EagleTrainer
from tests.training.test_target import toy_stream
from tests.training.toy_heads import SHORT

CONFIG = EagleConfig(
    tokens=64 * 16,
    num_steps=3,
    **SHORT,
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_layers=4, tie_word_embeddings=False)


def test_the_steps_of_training_are_those_of_drafting(target_dir: Path, tmp_path: Path) -> None:
    trainer = EagleTrainer(replace(CONFIG, feature_layers=(0, 2, 4)), target_dir, toy_stream(), tmp_path)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.model.parameters():  # as they are saved
            parameter.copy_((parameter + 0.1 * torch.randn(parameter.shape, generator=generator)).half())
    ids = torch.from_numpy(trainer.corpus.next(16, 2))
    with torch.no_grad():
        features, _, embedded = trainer._features(ids)
        steps = trainer._steps(features[:, :12], embedded)
        rows = [trainer.model.scored(states) @ trainer.output_embedding.T for states in steps]
    trainer._save_heads()
    head = load_head(tmp_path, load_target(target_dir))
    assert isinstance(head, EagleHead) and head.facts.feature_layers == (0, 2, 4)
    text = ids[1].tolist()
    for t in (0, 5, 11):
        sequence = head.sequence(SamplingParams(temperature=0.0))
        assert isinstance(sequence, EagleSequence)
        log = FeatureLog(keeps_all=True)
        with torch.inference_mode():
            log.append(0, head.weights.fuse(features[1, : t + 1]))
            sequence.read(log)
            sequence.commit(text[: t + 2])
            run = head.start([sequence])
            drafted = run.roots()
            for step in range(1, 3):
                drafted += run.after([(0, [tuple(text[t + 2 : t + 2 + step])])])[0]
        for step, found in enumerate(drafted):
            expected = rows[step][1, t, : head.num_tokens].numpy()
            np.testing.assert_allclose(found.logits[0], expected, atol=1e-3, rtol=1e-3)


def test_a_draft_learns_from_a_target_that_stays_as_it_is(target_dir: Path, tmp_path: Path) -> None:
    trainer = EagleTrainer(CONFIG, target_dir, toy_stream(), tmp_path / "whole")
    before = {name: value.clone() for name, value in trainer.target.state_dict().items()}
    figures = trainer.train()
    assert figures is not None and figures["loss"] < 0.9 * trainer.history[0]["loss"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.target.state_dict().items())
    loss, _ = trainer._loss(torch.from_numpy(trainer.corpus.next(16, 2)), 0.0)
    torch.autograd.backward(loss)
    grads = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values()), grads.keys()
    with load_head(tmp_path / "whole", load_target(target_dir)) as head:
        assert head.name == "eagle" and head.facts.feature_layers == (1, 2, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": 0}, "--steps 0: give at least 1"),
        ({"phases": (Phase(0.0, 4, 4),)}, "--length: windows longer than the 3 steps"),
        ({"feature_layers": (1, 2, 3)}, "--feature-layers 1 2 3: want some of 0 to 2, and 4"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    fields: dict[str, object], message: str, target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        EagleTrainer(replace(CONFIG, **fields), target_dir, toy_stream(), tmp_path)  # type: ignore[arg-type]


def test_a_draft_is_not_trained_on(target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an eagle draft begins anew; --resume goes on"):
        EagleTrainer(CONFIG, target_dir, toy_stream(), tmp_path, heads_dir=tmp_path)
