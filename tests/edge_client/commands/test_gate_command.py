"""`--gate` as a user types it: a tiny draft, a verifier in this process."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.engine.admission import Admission
from outrider.common.types import Origin, SamplingParams, Signals, VerifyRequest
from outrider.edge_client.commands.cli import main
from outrider.edge_client.drafting.base import Stop
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.gate.file import GateFile, write_gate_file
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

Seen = list[VerifyRequest]


@pytest.fixture(scope="module")
def draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def backend(draft_dir: Path) -> FakeBackend:
    return make_backend(draft_dir)


@pytest.fixture(scope="module")
def flags(draft_dir: Path, backend: FakeBackend) -> Iterator[list[str]]:
    with serving(backend) as server:
        address = f"127.0.0.1:{server.port}"
        yield ["--verifier", address, "--draft", str(draft_dir), "--max-new-tokens", "32", "--seed", "5"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Collects the rounds that the verifier admits or refuses."""
    taken: Seen = []
    admit = Admission.admit

    def spy(admission: Admission, job: Any) -> Any:
        if isinstance(job.request, VerifyRequest):
            taken.append(job.request)
        return admit(admission, job)

    monkeypatch.setattr(Admission, "admit", spy)
    return taken


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["run", "def f(", *arguments, "--ignore-eos", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def median_entropy(draft_dir: Path) -> float:
    with OnnxDraftModel.open(draft_dir) as model:
        sequence = model.sequence(SamplingParams(seed=5))
        sequence.commit([5, 6, 7])
        entropies = sorted(each.entropy_bits for each in sequence.propose(32).signals)
        sequence.close()
    return entropies[16]


@pytest.mark.parametrize("method", ["coupled", "sparse", "candidates", "block"])
def test_the_text_of_a_stop_gate_is_cloud_onlys(
    flags: list[str], draft_dir: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entropy = str(median_entropy(draft_dir))
    gate = ["--gate", "stop", "--gate-entropy", entropy, "--gate-nll", "5", "--mode", "speculative"]
    report = run_json(capsys, *flags, *gate, "--method", method)
    assert report["exact"] is True and report["gate"] == "stop" and len(report["token_ids"]) == 32
    assert report["stats"]["num_escalations"] > 0 and 0 < report["stats"]["hard_ratio"] < 1
    if method == "coupled":
        wanted = run_json(capsys, *flags, "--mode", "cloud-only")
        assert report["token_ids"] == wanted["token_ids"]
        for more in (["--pipeline", "on"], ["--mode", "auto"], ["--depth-policy", "optimal"]):
            assert run_json(capsys, *flags, *gate, *more)["token_ids"] == wanted["token_ids"]


def test_a_gate_by_variance_stays_exact_and_says_what_it_costs(
    flags: list[str], draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(draft_dir, tmp_path / "draft"))
    add_dropout(directory)
    with OnnxDraftModel.open(directory, has_variance=True) as model:
        sequence = model.sequence(SamplingParams(seed=5))
        sequence.commit([5, 6, 7])
        variances = sorted(each.variance or 0.0 for each in sequence.propose(32).signals)
        sequence.close()
    gate = ["--draft", str(directory), "--gate", "stop", "--gate-variance", f"{variances[16]:.9f}"]
    gate += ["--mode", "speculative"]
    wanted = run_json(capsys, *flags, "--mode", "cloud-only")
    report = run_json(capsys, *flags, *gate)
    stats = report["stats"]
    assert report["exact"] is True and report["token_ids"] == wanted["token_ids"]
    assert 0 < stats["hard_ratio"] < 1 and stats["num_draft_tokens"] > 0
    assert stats["mc_dropout_ms"] is not None and stats["mc_dropout_ratio"] is not None
    assert wanted["stats"]["mc_dropout_ms"] is None
    assert main(["run", "def f(", *flags, *gate, "--ignore-eos"]) == 0
    assert "MC dropout" in capsys.readouterr().err


def test_a_commit_gate_says_what_it_did(
    flags: list[str], draft_dir: Path, seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    entropy = str(median_entropy(draft_dir))
    gate = ["--gate", "commit", "--gate-entropy", entropy, "--gate-max-hard-ratio", "0.5"]
    report = run_json(capsys, *flags, *gate)
    stats = report["stats"]
    num_kept = report["token_origins"].count("gate")
    assert (report["exact"], report["gate"]) == (False, "commit")
    assert num_kept == stats["num_gate_tokens"] == report["num_unverified_tokens"] > 0
    assert report["token_is_verified"] == [origin != "gate" for origin in report["token_origins"]]
    assert stats["num_kept_blocks"] > 0 and stats["num_escalations"] > 0
    assert stats["verifier_calls_per_token"] == round(stats["num_rounds"] / 32, 4)
    arrived = [origin for request in seen for origin in request.origins]
    assert arrived.count(Origin.GATE) == num_kept, "the verifier has every one of them, marked"
    assert any(any(request.hard_mask) for request in seen)
    assert main(["run", "def f(", *flags, *gate, "--ignore-eos"]) == 0
    told = capsys.readouterr().err
    assert "edge-client: --gate commit is approximate" in told
    assert f"gate kept {num_kept} tokens in" in told and "calls a token" in told
    assert f"{num_kept} of 32 tokens are the draft's own, unverified" in told


def test_a_gate_that_is_sure_of_nothing_asks_for_everything(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = run_json(capsys, *flags, "--mode", "cloud-only")
    report = run_json(capsys, *flags, "--gate", "commit", "--gate-entropy", "0")
    assert report["token_ids"] == wanted["token_ids"] and report["exact"] is True
    assert report["stats"]["num_gate_tokens"] == 0
    assert main(["run", "def f(", *flags, "--gate", "commit", "--gate-entropy", "0"]) == 0
    assert "gate asked" in capsys.readouterr().err


def test_a_text_rule_lets_no_such_token_be_kept(
    flags: list[str], draft_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = EdgeTokenizer(draft_dir / "tokenizer.json")

    def kept_digits(*gate: str) -> int:
        report = run_json(capsys, *flags, "--max-new-tokens", "64", "--temperature", "2", *gate)
        pairs = zip(report["token_ids"], report["token_origins"], strict=True)
        texts = [tokenizer.token_text(token_id) for token_id, origin in pairs if origin == "gate"]
        return sum(any(letter.isdigit() for letter in text) for text in texts)

    assert kept_digits("--gate", "commit", "--gate-entropy", "1000") > 0
    assert kept_digits("--gate", "commit", "--gate-rules", "digits") == 0


def test_thresholds_come_from_a_file_and_stay_with_their_draft(
    flags: list[str], draft_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with OnnxDraftModel.open(draft_dir) as model:
        fingerprint = model.fingerprint
    path = tmp_path / "gate.yaml"
    write_gate_file(path, GateFile(entropy=1000.0, draft_fingerprint=fingerprint))
    report = run_json(capsys, *flags, "--gate", "commit", "--gate-file", str(path))
    assert report["stats"]["num_kept_blocks"] > 0
    write_gate_file(path, GateFile(entropy=1000.0, draft_fingerprint="0" * 64))
    assert main(["run", "x", *flags, "--gate", "commit", "--gate-file", str(path)]) == 2
    assert "is for the draft 000000000000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gate-nll", "1"], "--gate-nll goes with --gate stop or --gate commit"),
        (["--gate", "commit"], "--gate commit has no criterion"),
        (["--gate", "commit", "--gate-nll", "1", "--mode", "cloud-only"], "not --mode cloud-only"),
        (["--gate", "commit", "--gate-nll", "1", "--pipeline", "on"], "does not go with --pipeline on"),
        (["--gate", "stop", "--gate-nll", "1", "--draft-strategy", "prompt-lookup"], "lookup has none"),
        (["--gate", "stop", "--gate-variance", "1"], "no variant for MC dropout"),
        (["--gate", "maybe"], "one of off, stop, commit"),
        (["--gate", "stop", "--gate-margin", "2"], "at most 1"),
        (["--gate", "stop", "--gate-file", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_a_gate_that_cannot_work_ends_in_one_line_and_status_2(
    flags: list[str], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "x", *flags, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1, error


def test_config_show_tells_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--gate", "stop", "--gate-entropy", "1.5"]) == 0
    shown = capsys.readouterr().out
    assert "gate: 'stop'" in shown and "gate_entropy: 1.5" in shown and "gate_nll: none" in shown


def test_a_conversation_has_the_gate_too(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(\n/stats\n"))
    assert main(["chat", *flags, "--ignore-eos", "--gate", "commit", "--gate-entropy", "1000"]) == 0
    shown = capsys.readouterr()
    assert "--gate commit is approximate" in shown.err
    (line,) = [line for line in shown.out.splitlines() if line.startswith("num_gate_tokens")]
    assert int(line.split()[1]) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_ends_before_a_place_is_the_beginning_of_the_whole_one(
    draft_dir: Path, temperature: float
) -> None:
    def should_stop(token_id: int, signals: Signals | None, num_drafted: int) -> Stop:
        return Stop.BEFORE if num_drafted == 4 else Stop.NO

    with OnnxDraftModel.open(draft_dir) as model:
        for num_support in (0, 8):
            sampling = SamplingParams(temperature=temperature, seed=3)
            sequence = model.sequence(sampling, num_support=num_support)
            sequence.commit([5, 6, 7])
            sequence.propose(1)  # what is fed at once differs in the last bits
            ended, whole = sequence.propose(8, should_stop), sequence.propose(8)
            assert ended.token_ids == whole.token_ids[:3] and ended.draft_probs == whole.draft_probs[:3]
            assert ended.signals == whole.signals[:3] and ended.doubted == whole.signals[3]
            assert ended.supports == whole.supports[:3] and whole.doubted is None
            sequence.check_integrity()
            sequence.commit(whole.token_ids[:3])
            sequence.check_integrity()
            sequence.close()
