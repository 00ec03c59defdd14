"""Draft and target both in the verifier: the text is, token for token, that of the other two modes."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes.decoding import HostileDraft, Oracle, TieLedger, assert_same_text, decode
from support.processes.forked import running_verifier
from support.processes.pairs import EMBEDDED, Pair
from support.processes.server import serving
from test_same_text import VOCAB, make_prompt

from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.server.cli import main
from outrider.common.errors import LinkError, RoundFailedError
from outrider.common.types import GeneratedTokens, Origin, SamplingParams, SessionResponse, StopParams
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.link.base import Connection, VerifierLink
from outrider.experiments.shared.processes import VerifierProcess, run_edge
from outrider.experiments.shared.prompts import load_prompts

CO_LOCATED = ExecutionMode.CO_LOCATED
SETTINGS = tuple(itertools.product((0.0, 0.8), (1, 4, 8)))


@pytest.fixture(scope="module")
def verifier(tiny_pair: Pair) -> Iterator[VerifierProcess]:
    with running_verifier("--draft", str(tiny_pair.own_draft), target=tiny_pair.target) as process:
        yield process


@pytest.fixture(scope="module")
def embedded() -> Iterator[VerifierProcess]:
    with running_verifier() as process:
        yield process


def compare(
    address: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    depth: int,
    oracle: Oracle,
    ledger: TieLedger,
    draft: DraftModel | None = None,
    num_new: int = 32,
) -> SessionResult:
    """Co-located, and speculative with `draft`, against cloud-only; returns the first co-located run."""
    reference = decode(address, prompt, sampling, num_new=num_new).token_ids
    results: list[SessionResult] = []

    def again(prefix: Sequence[int], n: int) -> Sequence[int]:
        text = [*prompt, *prefix]
        results.append(decode(address, text, sampling, mode=CO_LOCATED, num_new=n, depth=depth))
        return results[-1].token_ids

    def speculative(prefix: Sequence[int], n: int) -> Sequence[int]:
        text = [*prompt, *prefix]
        return decode(address, text, sampling, draft=draft, num_new=n, depth=depth).token_ids

    assert_same_text(reference, again, prompt, sampling, oracle, ledger)
    if draft is not None:
        assert_same_text(reference, speculative, prompt, sampling, oracle, ledger)
    return results[0]


def test_co_located_speculative_and_cloud_only_write_one_text(
    verifier: VerifierProcess, own_draft: DraftModel, tiny_oracle: Oracle
) -> None:
    ledger = TieLedger()

    def run(case: tuple[int, tuple[float, int]]) -> int:
        seed, (temperature, depth) = case
        sampling = SamplingParams(temperature=temperature, seed=seed)
        prompt = make_prompt(seed)
        result = compare(verifier.address, prompt, sampling, depth, tiny_oracle, ledger, own_draft)
        assert (
            result.num_unverified_tokens == 0
            and max(r.num_draft_tokens for r in result.stats.rounds) <= depth
        )
        return sum(r.num_accepted_tokens for r in result.stats.rounds)

    with ThreadPoolExecutor(4) as pool:  # so that several are drafted for at once
        accepted = list(pool.map(run, enumerate(SETTINGS * 2)))
    assert sum(accepted) > len(accepted), "nothing was ever accepted: the comparison proves little"
    ledger.check()


def test_a_draft_that_is_always_wrong_changes_the_speed_alone(tiny_oracle: Oracle) -> None:
    prompt = make_prompt(3)
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature=temperature, seed=3)
        with serving(tiny_oracle.backend) as server:
            reference = decode(f"127.0.0.1:{server.port}", prompt, sampling, num_new=24).token_ids
        hostile = HostileDraft([*prompt, *reference], VOCAB)
        hostile.fingerprint = "hostile"
        drafter = CoLocatedDrafter(hostile)
        with serving(tiny_oracle.backend, drafter=drafter) as server:
            result = decode(f"127.0.0.1:{server.port}", prompt, sampling, mode=CO_LOCATED, num_new=24)
        assert result.token_ids == reference
        rounds = result.stats.rounds
        assert len(rounds) == 23 and not any(r.num_accepted_tokens for r in rounds)
        assert sum(r.num_draft_tokens for r in rounds) > 4 * 18


@pytest.mark.slow
@pytest.mark.ci
def test_on_the_embedded_pair_too(embedded: VerifierProcess) -> None:
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    oracle, ledger = Oracle(EMBEDDED / "target"), TieLedger()
    prompts = [tokenizer.encode(prompt.text) for prompt in load_prompts(limit=3)]
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        for seed, (temperature, depth) in enumerate(((0.0, 4), (0.8, 4), (0.8, 8))):
            sampling = SamplingParams(temperature=temperature, seed=seed)
            result = compare(
                embedded.address, prompts[seed], sampling, depth, oracle, ledger, draft, num_new=48
            )
            here = decode(embedded.address, prompts[seed], sampling, draft=draft, num_new=48, depth=depth)
            rates = [run.stats.summary(run.origins)["acceptance_rate"] for run in (result, here)]
            assert rates[0] == rates[1], "the verifier drafts otherwise than the edge"
            assert rates[0] > 0.1, "next to nothing was accepted: the comparison proves little"  # type: ignore[operator]
    ledger.check()


def test_the_same_drafts_are_drafted_there_as_here(embedded: VerifierProcess) -> None:
    """Same weights, same noise: rounds and acceptance are those of the edge's own draft, exactly."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompt = tokenizer.encode(load_prompts(limit=1)[0].text)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=5)
    there = decode(embedded.address, prompt, sampling, mode=CO_LOCATED, num_new=64)
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        here = decode(embedded.address, prompt, sampling, draft=draft, num_new=64)
    shapes = [
        [(r.num_draft_tokens, r.num_accepted_tokens) for r in run.stats.rounds] for run in (there, here)
    ]
    assert there.token_ids == here.token_ids and shapes[0] == shapes[1]
    assert there.origins == here.origins
    for name in ("num_rounds", "acceptance_per_position", "tokens_per_round"):
        assert there.stats.summary(there.origins)[name] == here.stats.summary(here.origins)[name]
    assert there.stats.summary(there.origins)["rtt_ms"] is None
    assert there.stats.summary(there.origins)["draft_ms"]


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_stream_lost_in_mid_text_leaves_no_trace(verifier: VerifierProcess, transport: str) -> None:
    prompt = make_prompt(9)
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(temperature=temperature, seed=9)
        expected = decode(verifier.address, prompt, sampling, num_new=60).token_ids
        cuts = Cuts(after=(3, 8))
        result = decode(
            verifier.address,
            prompt,
            sampling,
            mode=CO_LOCATED,
            num_new=60,
            depth=3,
            transport=transport,
            wrap=lambda link, cuts=cuts: _CutLink(link, cuts),  # type: ignore[misc]
        )
        assert cuts.num_fired == 2
        assert result.token_ids == expected
        assert result.num_unverified_tokens == 0 and result.stats.num_reconnects == 2


def test_a_stop_inside_a_draft_ends_the_text_like_cloud_only(verifier: VerifierProcess) -> None:
    prompt, sampling = make_prompt(4), SamplingParams(temperature=0.8, seed=4)
    written = decode(verifier.address, prompt, sampling, num_new=40).token_ids
    stop_id = next(t for i, t in enumerate(written[6:], 6) if t not in written[:i])
    for stop in (
        StopParams(max_new_tokens=40, stop_token_ids=(stop_id,), ignore_eos=True),
        StopParams(max_new_tokens=40, stop_strings=(f"<{stop_id}>",), ignore_eos=True),
        StopParams(max_new_tokens=7, ignore_eos=True),
    ):
        runs = [
            decode(verifier.address, prompt, sampling, mode=mode, depth=8, stop=stop)
            for mode in (ExecutionMode.CLOUD_ONLY, CO_LOCATED)
        ]
        assert runs[0].token_ids == runs[1].token_ids and runs[0].text == runs[1].text
        assert runs[0].finish_reason is runs[1].finish_reason
        assert len(runs[1].origins) == len(runs[1].token_ids) < 40


def test_the_command_runs_co_located_without_a_draft_of_its_own(
    embedded: VerifierProcess, tmp_path: Path
) -> None:
    shutil.copy(EMBEDDED / "draft" / "tokenizer.json", tmp_path)
    flags = ["run", "def read_lines(path):", "--verifier", embedded.address, "--draft", str(tmp_path)]
    flags += ["--seed", "3", "--max-new-tokens", "40", "--ignore-eos"]
    reports = {}
    for mode in ("cloud-only", "co-located"):
        done = run_edge([*flags, "--mode", mode, "--json"])
        assert done.returncode == 0, done.stderr
        reports[mode] = json.loads(done.stdout)
    report = reports["co-located"]
    assert report["token_ids"] == reports["cloud-only"]["token_ids"] and report["mode"] == "co-located"
    assert report["num_unverified_tokens"] == 0
    assert report["token_origins"][0] == str(Origin.TARGET)
    assert {"accepted", "correction", "bonus"} <= set(report["token_origins"])
    spec = json.loads((EMBEDDED / "draft" / "draft.json").read_text())
    assert report["draft_fingerprint"] == spec["fingerprint"]
    stats = report["stats"]
    assert stats["num_accepted_tokens"] + stats["num_rounds"] == 39 and stats["num_draft_tokens"] > 0
    shown = run_edge([*flags, "--mode", "co-located"])
    assert shown.stdout.rstrip("\n") == report["text"].rstrip("\n")
    summary = re.search(r"(\d+) rounds · (\d+) of (\d+) drafted accepted", shown.stderr)
    assert summary is not None, shown.stderr
    rounds, accepted, drafted = map(int, summary.groups())
    assert rounds + accepted == 39 and drafted >= accepted, (
        "the depths, and so the rounds, are each run's own"
    )

    speculative = run_edge([*flags, "--mode", "speculative"])
    assert speculative.returncode == 1 and "draft.json" in speculative.stderr


def test_a_verifier_without_a_draft_names_the_flag(tiny_verifier: VerifierProcess) -> None:
    with pytest.raises(RoundFailedError, match="--draft"):
        decode(tiny_verifier.address, make_prompt(1), SamplingParams(), mode=CO_LOCATED)


def test_a_draft_of_another_tokenizer_or_a_missing_one_is_refused_at_the_start(
    tiny_pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["serve", "--listen", "127.0.0.1:0", "--target", str(tiny_pair.target)]
    assert main([*flags, "--draft", str(EMBEDDED / "draft")]) == 5
    assert "its tokenizer is not the target's: name a draft" in capsys.readouterr().err
    assert main([*flags, "--draft", "/nowhere"]) == 2
    assert "--draft /nowhere: there is no such directory" in capsys.readouterr().err


class Cuts:
    """Which messages of tokens (counted over all connections, from 1) are the last of their connection."""

    def __init__(self, after: tuple[int, ...]) -> None:
        self.after = after
        self.num_seen = 0
        self.num_fired = 0


class _CutLink:
    def __init__(self, link: VerifierLink, cuts: Cuts) -> None:
        self._link, self._cuts = link, cuts

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def connect(self, timeout_s: float) -> Connection:
        return _CutConnection(self._link.connect(timeout_s), self._cuts)  # type: ignore[return-value]


class _CutConnection:
    def __init__(self, connection: Connection, cuts: Cuts) -> None:
        self._connection, self._cuts = connection, cuts

    def __getattr__(self, name: str) -> object:
        return getattr(self._connection, name)

    def receive(self, timeout_s: float) -> SessionResponse | None:
        reply = self._connection.receive(timeout_s)
        if isinstance(reply, GeneratedTokens):
            self._cuts.num_seen += 1
            if self._cuts.num_seen in self._cuts.after:
                self._cuts.num_fired += 1
                self._connection.close()
                raise LinkError("cut by the test")
        return reply
