"""Verifiers as real processes, and small real pairs: built once a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.models import make_tiny_target
from support.processes.decoding import Oracle
from support.processes.forked import running_verifier
from support.processes.mortal import MortalVerifier
from support.processes.pairs import Pair

from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.experiments.shared.processes import VerifierProcess


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("tiny")
    target = make_tiny_target(root / "target", max_context=512)
    other = make_tiny_target(root / "other", hidden=64, num_layers=2, max_context=512, seed=5)
    for name, source in (("own", target), ("random", other)):
        export_draft(source, root / name)
    return Pair(target, root / "own", root / "random")


@pytest.fixture(scope="session")
def tiny_verifier(tiny_pair: Pair) -> Iterator[VerifierProcess]:
    with running_verifier(target=tiny_pair.target) as verifier:
        yield verifier


@pytest.fixture(scope="session")
def _mortal(tiny_pair: Pair) -> Iterator[MortalVerifier]:
    with contextlib.closing(MortalVerifier(tiny_pair.target)) as verifier:
        yield verifier


@pytest.fixture
def mortal(_mortal: MortalVerifier) -> MortalVerifier:
    """A verifier that a test may kill."""
    _mortal.revive()
    return _mortal


@pytest.fixture(scope="session")
def tiny_oracle(tiny_pair: Pair) -> Oracle:
    return Oracle(tiny_pair.target)


@pytest.fixture(scope="session")
def own_draft(tiny_pair: Pair) -> Iterator[DraftModel]:
    with OnnxDraftModel.open(tiny_pair.own_draft) as model:
        yield model


@pytest.fixture(scope="session")
def random_draft(tiny_pair: Pair) -> Iterator[DraftModel]:
    with OnnxDraftModel.open(tiny_pair.random_draft) as model:
        yield model
