"""Sessions that draft in PyTorch: cloud-only's text, with chains, trees, several rounds in flight and every fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.edge.engine_link import Chances, EngineLink
from support.models import make_tiny_target
from test_same_text_everywhere import FAULTS

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.tree import is_chain
from outrider.common.types import SamplingParams, StopParams, TokenIds
from outrider.edge_client.controller.depth.fixed import FixedDepth
from outrider.edge_client.controller.window import RoundWindow
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, SessionOptions
from outrider.edge_client.drafting.backend import BackendSettings
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel
from outrider.edge_client.drafting.trees import TreeBudget
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.transport.deadline import RoundDeadline
from outrider.edge_client.transport.remote_verifier import RemoteVerifier

PROMPT = (5, 6, 7, 8)
NUM_NEW = 16
# The target's own weights, rounded: drafts are accepted often and not always.
DRAFTS = {
    "float32, fp8 KV": BackendSettings("torch", "cpu", "float32", "fp8"),
    "fp8": BackendSettings("torch", "cpu", "fp8"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_layers=2, hidden=64)


@pytest.fixture(scope="module")
def backend(directory: Path) -> PagedBackend:
    return load_target(directory, kv_tokens=512)


@pytest.fixture(scope="module")
def alone() -> dict[int, TokenIds]:
    """Cloud-only's texts by seed, as they are needed."""
    return {}


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class TargetLink(EngineLink):
    """To an engine of a real target, whose sequences keep no ids."""

    def check_integrity(self) -> None:
        self.engine.check_integrity()


def decode(
    backend: PagedBackend,
    draft: TorchDraftModel | None,
    seed: int,
    faults: Chances = FAULTS["none"],
    tree: TreeBudget | None = None,
    window: int = 1,
) -> tuple[SessionResult, EngineLink]:
    link = TargetLink(backend, faults, seed=seed)  # type: ignore[arg-type]
    verifier = RemoteVerifier(
        link,  # type: ignore[arg-type]
        RoundDeadline(0.5),
        recover_timeout_s=1000.0,
        is_patient=True,
        clock=link.clock,
        threads=link.threads,
    )
    options = SessionOptions(
        mode=ExecutionMode.CLOUD_ONLY if draft is None else ExecutionMode.SPECULATIVE,
        sampling=SamplingParams(temperature=0.8 if seed % 2 else 0.0, seed=seed),
        stop=StopParams(NUM_NEW, ignore_eos=True),
        on_timeout=OnTimeout.WAIT,
        recover_timeout_s=1000.0,
        tree=tree,
    )
    session = EdgeSession(
        PROMPT,
        options,
        decode=lambda token_id: f"<{token_id}>",
        verifier=verifier,
        draft=draft,
        depth=FixedDepth(4),
        window=RoundWindow(window),
    )
    for _ in session.generate():
        link.check_integrity()
    return session.result, link


@pytest.mark.parametrize("name", DRAFTS)
def test_a_torch_draft_writes_cloud_onlys_text_under_every_fault(
    name: str, directory: Path, backend: PagedBackend, alone: dict[int, TokenIds]
) -> None:
    happened: Counter[str] = Counter()
    with TorchDraftModel.open(directory, DRAFTS[name]) as draft:
        for number, faults in enumerate(FAULTS.values()):
            tree = TreeBudget(8, 4, 3) if number % 3 else None
            window = 1 + 2 * (number % 2)
            if number not in alone:
                alone[number] = decode(backend, None, number)[0].token_ids
            result, link = decode(backend, draft, number, faults, tree, window)
            assert result.token_ids == alone[number] and len(result.token_ids) == NUM_NEW
            assert result.num_unverified_tokens == 0
            rounds = result.stats.rounds
            happened["accepted"] += sum(each.num_accepted_tokens for each in rounds)
            happened["rejected"] += sum(each.num_draft_tokens - each.num_accepted_tokens for each in rounds)
            happened["trees"] += sum(not is_chain(each.parents) for each in link.sent)
            happened["faults"] += sum(link.fired.values())
    assert min(happened[each] for each in ("accepted", "rejected", "trees", "faults")) > 20, happened
