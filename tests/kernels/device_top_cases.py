"""What is told of trees on a device is what the host tells. Run by test_triton_kernels.py, as triton_cases.py is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.eagle import make_eagle
from support.heads import make_heads
from support.models import make_tiny_target

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.sequence import Head
from outrider.cloud_verifier.heads.source import WantedDraft
from outrider.common.errors import ModelError
from outrider.common.noise.draws import coupled_top, noise_row, top_scores
from outrider.common.noise.philox import Purpose
from outrider.common.types import Draft, SamplingParams
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.kernels import device_top
from outrider.kernels.device_top import coupled_tops

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=2**64 - 3),
    SamplingParams(temperature=0.6, seed=5),
    SamplingParams(temperature=0.9, seed=6, top_p=0.8),  # told by the host
)
PROMPT = tuple(range(3, 20))


@pytest.mark.parametrize("num_tokens", [5, 700])
def test_the_largest_sums_are_those_of_the_host(num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    logits = (3 * rng.normal(size=(4, 720))).astype(np.float32)
    temperatures, seed, positions = np.float32([0.0, 0.3, 1.0, 2.5]), 2**63 + 9, (4, 5, 6, 2**31)
    keys = np.array([(seed, Purpose.COUPLED, position, 0) for position in positions], np.uint64)
    sums, ids = coupled_tops(
        torch.from_numpy(logits),
        num_tokens,
        torch.from_numpy(temperatures),
        torch.from_numpy(keys.view(np.int64)),
        8,
    )
    for row, temperature in enumerate(temperatures):
        scores = logits[row, :num_tokens]
        if temperature:
            noise = noise_row(seed, positions[row], num_tokens)
            expected_ids, expected = coupled_top(scores / temperature, noise, 8, 1e9)
        else:
            expected_ids, expected = top_scores(scores, 8, 1e9)
        assert ids[row].tolist() == expected_ids.tolist()
        np.testing.assert_allclose(sums[row], expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Head]]:
    folder = tmp_path_factory.mktemp("models")
    target = make_tiny_target(folder / "target", num_layers=4)

    def make(kind: str) -> Head:
        out: Path = folder / kind
        directory = make_eagle(out, "specforge") if kind == "eagle" else make_heads(out, kind)
        head = load_head(directory, load_target(target))
        assert isinstance(head, Head)
        return head

    yield make


def draft_trees(head: Head) -> list[Draft | Exception]:
    """Returns trees of sequences of all samplings together, by random features."""
    chance = torch.Generator().manual_seed(3)
    sequences = [head.sequence(each) for each in SAMPLINGS]
    features = getattr(head.weights, "fuse", lambda states: states)
    size = 128 * len(head.facts.feature_layers)
    for number, sequence in enumerate(sequences):
        log = FeatureLog(keeps_all=head.reads_all)
        with torch.inference_mode():
            log.append(0, features(torch.randn(len(PROMPT) - number - 1, size, generator=chance)))
            sequence.read(log)
        sequence.commit(PROMPT[number:])
    wanted = [WantedDraft(12, TreeBudget(12, 6, 3), NodeValues()) for _ in sequences]
    return head.propose_together(sequences, wanted)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle"])
def test_trees_are_those_of_the_host(make_head: Callable[[str], Head], kind: str, monkeypatch) -> None:
    rows: list[int] = []
    score = device_top.coupled_tops
    monkeypatch.setattr(
        "outrider.cloud_verifier.heads.device_tops.coupled_tops",
        lambda logits, *its: rows.append(len(logits)) or score(logits, *its),
    )
    head = make_head(kind)
    expected = draft_trees(head)
    assert not rows
    head.backend.has_device_logits = True
    found = draft_trees(head)
    assert rows and rows[0] == (3 * head.facts.max_depth if kind == "medusa" else 3), "the last is the host's"
    for tree, other in zip(found, expected, strict=True):
        assert isinstance(tree, Draft) and isinstance(other, Draft) and len(tree.token_ids) == 12
        assert (tree.token_ids, tree.parents) == (other.token_ids, other.parents)


def test_logits_that_are_no_numbers_are_an_error(make_head: Callable[[str], Head]) -> None:
    head = make_head("hydra")
    head.backend.has_device_logits = True
    expected, score = draft_trees(head), head.backend.decoder.score

    def damage_once(states: torch.Tensor) -> torch.Tensor:
        head.backend.decoder.score = score
        logits = score(states).clone()
        logits[0] = torch.nan
        return logits

    head.backend.decoder.score = damage_once
    found = draft_trees(head)
    assert isinstance(found[0], ModelError) and "not finite" in str(found[0])
    assert found[1:] == expected[1:], "another sequence's draft"
