"""The embedded pair: the same text speculative and cloud-only, with drafts good, random and hostile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.models import make_tiny_target
from support.notes import Note
from support.processes.decoding import HostileDraft, Oracle, TieLedger, assert_same_text, decode
from support.processes.forked import running_verifier
from support.processes.pairs import EMBEDDED

from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.processes import VerifierProcess
from outrider.experiments.shared.prompts import load_prompts


@pytest.fixture(scope="module")
def verifier() -> Iterator[VerifierProcess]:
    with running_verifier() as process:
        yield process


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, DraftModel]]:
    """The embedded draft, and one of random weights with the same tokenizer."""
    root = tmp_path_factory.mktemp("random")
    make_tiny_target(root / "hf", vocab=8192, hidden=64, num_layers=1, max_context=1024)
    (root / "hf" / "tokenizer.json").write_bytes((EMBEDDED / "draft" / "tokenizer.json").read_bytes())
    export_draft(root / "hf", root / "draft")
    with OnnxDraftModel.open(EMBEDDED / "draft") as ours, OnnxDraftModel.open(root / "draft") as random:
        yield {"embedded": ours, "random": random}


def check(
    address: str, drafts: dict[str, DraftModel], cases: Sequence[tuple[float, int, int]], num_new: int
) -> tuple[int, TieLedger]:
    """Each case with each draft and the hostile one; returns the number of speculative runs."""
    oracle, ledger = Oracle(EMBEDDED / "target"), TieLedger()
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompts = [tokenizer.encode(p.text) for p in load_prompts()]

    def run(case: tuple[float, int, int]) -> int:
        temperature, depth, seed = case
        sampling = SamplingParams(temperature=temperature, seed=seed)
        prompt = prompts[seed % len(prompts)]
        reference = decode(address, prompt, sampling, num_new=num_new).token_ids
        models = {**drafts, "hostile": HostileDraft([*prompt, *reference], tokenizer.num_tokens)}
        for name, model in models.items():

            def again(
                prefix: Sequence[int], n: int, model: object = model, name: str = name
            ) -> Sequence[int]:
                transport = "unary" if name == "random" else "stream"
                return decode(
                    address,
                    [*prompt, *prefix],
                    sampling,
                    draft=model,
                    num_new=n,
                    depth=depth,
                    transport=transport,
                ).token_ids

            assert_same_text(reference, again, prompt, sampling, oracle, ledger)
        return len(models)

    with ThreadPoolExecutor(3) as pool:
        return sum(pool.map(run, cases)), ledger


def test_speculative_is_cloud_only_on_the_embedded_pair(
    verifier: VerifierProcess, drafts: dict[str, DraftModel], note: Note
) -> None:
    cases = [(t, d, i) for i, (t, d) in enumerate(itertools.product((0.0, 0.7, 1.0), (1, 4, 8)))]
    num_runs, ledger = check(verifier.address, drafts, cases, num_new=32)
    assert num_runs == 27
    note(f"embedded pair: {num_runs} runs, {ledger.check()}")


@pytest.mark.slow
def test_speculative_is_cloud_only_on_the_embedded_pair_at_length(
    verifier: VerifierProcess, drafts: dict[str, DraftModel], note: Note
) -> None:
    cases = [(t, d, s) for t in (0.0, 0.7, 1.0) for d in (1, 4, 8) for s in range(12)]
    num_runs, ledger = check(verifier.address, drafts, cases, num_new=128)
    note(f"embedded pair: {num_runs} runs, {ledger.check()}")


def test_the_embedded_draft_is_worth_having(verifier: VerifierProcess, drafts: dict[str, DraftModel]) -> None:
    """Not a benchmark: a pair that no longer belongs together (a swapped file, say) is found out."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    drafted = accepted = 0
    for prompt in load_prompts(limit=4):
        sampling = SamplingParams(temperature=0.8, seed=1)
        result = decode(
            verifier.address, tokenizer.encode(prompt.text), sampling, draft=drafts["embedded"], num_new=48
        )
        drafted += sum(r.num_draft_tokens for r in result.stats.rounds)
        accepted += sum(r.num_accepted_tokens for r in result.stats.rounds)
    assert accepted / drafted > 0.25


def test_everything_embedded_is_small_enough_to_ship() -> None:
    size = sum(path.stat().st_size for path in Path(EMBEDDED).rglob("*") if path.is_file())
    assert size <= 60e6
    assert all(p.stat().st_size <= 15_000_000 for p in (EMBEDDED / "target").glob("*.safetensors"))
