"""The commands as a user types them: output, exit statuses, and one clear line for every mistake."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import eventually
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.verification.logprobs import logprobs_of
from outrider.common.errors import LinkError
from outrider.common.types import Method, TokenLogprobs
from outrider.edge_client.commands.cli import main
from outrider.edge_client.session.factory import Edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class World:
    draft: Path
    backend: FakeBackend
    address: str

    def flags(self, *more: str) -> list[str]:
        # A missed deadline of a busy machine must not change a text.
        common = ("--draft", str(self.draft), "--max-new-tokens", "24", "--on-timeout", "wait")
        return ["--verifier", self.address, *common, *more]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    draft = make_tiny_draft(tmp_path_factory.mktemp("cli"))
    backend = make_backend(draft)
    with serving(backend) as server:
        yield World(draft, backend, f"127.0.0.1:{server.port}")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["run", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


# ------------------------------------------------------------------------------------------ output


def test_the_three_modes_run_and_the_two_exact_ones_agree(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for temperature in ("0", "0.8"):
        flags = world.flags("--temperature", temperature, "--seed", "7")
        speculative = run_json(capsys, "def f(", *flags)
        cloud_only = run_json(capsys, "def f(", *flags, "--mode", "cloud-only")
        unary = run_json(capsys, "def f(", *flags, "--transport", "unary")
        edge_only = run_json(capsys, "def f(", *flags, "--mode", "edge-only")
        assert speculative["token_ids"] == cloud_only["token_ids"] == unary["token_ids"]
        assert speculative["text"] == cloud_only["text"]
        assert speculative["num_unverified_tokens"] == 0
        assert edge_only["num_unverified_tokens"] == len(edge_only["token_ids"]) > 0


def test_json_has_what_the_contract_names(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "def f(", *world.flags())
    assert {"text", "token_ids", "token_origins", "finish_reason", "seed"} <= report.keys()
    assert {"num_unverified_tokens", "target_fingerprint", "draft_fingerprint", "stats"} <= report.keys()
    assert report["stats"].keys() >= {
        *("num_rounds", "num_draft_tokens", "num_accepted_tokens", "acceptance_rate", "tokens_per_round"),
        *("ttft_ms", "tpot_ms", "bytes_up", "bytes_down", "num_fallback_tokens"),
        *("draft_ms", "rtt_ms", "forward_ms"),
    }
    assert len(report["token_ids"]) == len(report["token_origins"])
    assert report["target_fingerprint"] == world.backend.fingerprint
    again = run_json(capsys, "def f(", *world.flags("--seed", str(report["seed"])))
    assert again["token_ids"] == report["token_ids"], "the seed that was drawn is the one printed"


def test_the_text_is_on_stdout_and_the_summary_on_stderr(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = world.flags("--seed", "3")
    text = run_json(capsys, "def f(", *flags)["text"]
    assert main(["run", "def f(", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == text.removesuffix("\n") + "\n", "a pipe gets whole lines"
    assert "seed 3" in shown.err and "tokens/s" in shown.err and len(shown.err.splitlines()) <= 2


def test_unverified_text_is_said_to_be_so(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "x", *world.flags("--mode", "edge-only")]) == 0
    assert "the draft's own, unverified" in capsys.readouterr().err


def test_a_prompt_comes_from_a_file_or_standard_input_just_the_same(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = world.flags("--temperature", "0")
    expected = run_json(capsys, "def value_7", *flags)["token_ids"]
    (tmp_path / "prompt").write_text("def value_7")
    assert run_json(capsys, "--prompt-file", str(tmp_path / "prompt"), *flags)["token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("def value_7"))
    assert run_json(capsys, "-", *flags)["token_ids"] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("def value_7"))
    assert run_json(capsys, *flags)["token_ids"] == expected


def test_sampling_flags_reach_the_target(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    flags = world.flags("--temperature", "0")
    first = run_json(capsys, "abc", *flags)["token_ids"][0]
    banned = run_json(capsys, "abc", *flags, "--logit-bias", f"{first}:-1000")
    assert first not in banned["token_ids"]
    forced = run_json(capsys, "abc", *flags, "--logit-bias", "77:1000", "--logit-bias", "78:900")
    assert set(forced["token_ids"]) == {77}
    stopped = run_json(capsys, "abc", *flags, "--logit-bias", "77:1000", "--stop-token-id", "77")
    assert stopped["token_ids"] == [77] and stopped["finish_reason"] == "stop"


def test_a_slowed_draft_is_labelled(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(
        capsys, "abc", *world.flags("--mode", "speculative", "--min-draft-ms", "2", "--max-new-tokens", "8")
    )
    assert report["labels"] == ["min-draft-ms=2"] and report["stats"]["draft_ms_per_token"] >= 2.0


def test_a_draft_that_makes_the_text_slower_is_said_to_once(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = world.flags(
        "--mode",
        "speculative",
        "--min-draft-ms",
        "30",
        "--num-speculative-tokens",
        "1",
        "--ignore-eos",
        "--seed",
        "1",
    )
    assert main(["run", "def f(", *slow, "--max-new-tokens", "44"]) == 0
    assert capsys.readouterr().err.count("edge-client: drafting made this text slower: ") == 1
    assert main(["run", "def f(", *slow, "--max-new-tokens", "20", "--json"]) == 0
    assert capsys.readouterr().err == "", "too few rounds to know"


@pytest.mark.parametrize("method", list(Method))
def test_every_method_runs_and_an_approximate_one_says_so_in_one_line(
    world: World, capsys: pytest.CaptureFixture[str], method: Method
) -> None:
    flags = world.flags("--method", method, "--seed", "5")
    assert main(["run", "def f(", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["method"] == method and report["exact"] is method.is_exact
    assert report["reproducible"] is (method is Method.COUPLED), "at a temperature of 0.8"
    is_judged = [origin in ("accepted", "correction") for origin in report["token_origins"]]
    assert report["token_is_approximate"] == ([False] * len(is_judged) if method.is_exact else is_judged)
    assert report["num_approximate_tokens"] == sum(report["token_is_approximate"])
    warning = "is approximate: the text no longer has the target's distribution"
    expected = [] if method.is_exact else [f"edge-client: --method {method} {warning}"]
    assert shown.err.splitlines() == expected
    assert main(["run", "def f(", *flags]) == 0
    shown = capsys.readouterr()
    assert shown.out == report["text"].removesuffix("\n") + "\n"
    last = shown.err.splitlines()[-1]
    assert len(shown.err.splitlines()) == (1 if method.is_exact else 2)
    assert (f"method {method}" in last) is (method is not Method.COUPLED)
    assert ("approximate" in last) is not method.is_exact


def test_a_mode_without_drafted_tokens_is_exact_whatever_the_method(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = world.flags("--method", "threshold", "--seed", "5")
    assert main(["run", "x", *flags, "--mode", "cloud-only", "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["method"] is None and report["exact"] is True and shown.err == ""
    assert report["reproducible"] is True
    report = run_json(capsys, "x", *world.flags("--mode", "edge-only"))
    assert report["method"] is None and report["exact"] is False and report["reproducible"] is False


def test_logprobs_are_the_targets_raw_and_processed(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = world.flags("--temperature", "0.5", "--seed", "2")
    plain = run_json(capsys, "def f(", *flags)
    assert "logprobs" not in plain
    monkeypatch.setenv("OUTRIDER_EDGE_LOGPROBS", "3")
    report = run_json(capsys, "def f(", *flags)
    assert report["token_ids"] == plain["token_ids"]
    prompt_ids = EdgeTokenizer(world.draft / "tokenizer.json").encode("def f(")
    for index, (token_id, entry) in enumerate(zip(report["token_ids"], report["logprobs"], strict=True)):
        context = [*prompt_ids, *report["token_ids"][:index]]
        logits = world.backend.logits_after(context)[: world.backend.num_tokens].astype(np.float64)
        raw = logits - np.log(np.exp(logits).sum())
        processed = logits / 0.5 - np.log(np.exp(logits / 0.5).sum())
        assert entry["raw_logprob"] == pytest.approx(raw[token_id], abs=1e-4)
        assert entry["processed_logprob"] == pytest.approx(processed[token_id], abs=1e-4)
        best = np.argsort(-raw)[:3]
        assert [top["id"] for top in entry["top"]] == best.tolist()
        assert [top["logprob"] for top in entry["top"]] == pytest.approx(raw[best], abs=1e-4)
        assert all(isinstance(top["token"], str) for top in entry["top"])
    chosen = run_json(capsys, "def f(", *flags, "--method", "candidates")
    for origin, entry in zip(chosen["token_origins"], chosen["logprobs"], strict=True):
        assert (entry is None) is (origin == "correction"), "what the edge chooses has none"


def test_a_method_that_is_not_offered_is_refused_with_those_that_are(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(make_backend(world.draft), ServeConfig(methods="coupled,block")) as server:
        address = f"127.0.0.1:{server.port}"
        assert main(["run", "abc", *world.flags("--method", "sparse", "--verifier", address)]) == 4
        shown = capsys.readouterr()
        assert shown.out == "" and len(shown.err.splitlines()) == 1
        assert "sparse" in shown.err and "coupled, block" in shown.err
        run_json(capsys, "abc", *world.flags("--method", "block", "--verifier", address))


# -------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--temperature", "-1"], 2, "temperature (--temperature): is -1.0; it must be 0 (greedy) or from"),
        (["--temperature", "hot"], 2, "temperature"),
        (["--top-p", "0"], 2, "top_p"),
        (["--top-p", "nan"], 2, "top_p"),
        (["--min-p", "1"], 2, "min_p"),
        (["--repetition-penalty", "0"], 2, "repetition_penalty"),
        (["--max-new-tokens", "0"], 2, "max_new_tokens"),
        (["--mode", "fastest"], 2, "mode"),
        (["--method", "guess"], 2, "method"),
        (["--support-size", "8"], 2, "--support-size goes with --method sparse or --method block, not with"),
        (
            ["--method", "sparse", "--num-candidates", "4"],
            2,
            "--num-candidates goes with --method candidates",
        ),
        (
            ["--method", "typical", "--threshold-pass", "0.5"],
            2,
            "--threshold-pass goes with --method threshold",
        ),
        (["--method", "shortcut", "--threshold-ratio", "1"], 2, "--threshold-ratio goes with"),
        (
            ["--method", "threshold", "--typical-epsilon", "0.1"],
            2,
            "--typical-epsilon goes with --method typical",
        ),
        (["--typical-delta", "0.1"], 2, "--typical-delta goes with --method typical"),
        (["--method", "sparse", "--support-size", "65"], 2, "flag --support-size): is '65'"),
        (["--method", "candidates", "--num-candidates", "0"], 2, "flag --num-candidates): is '0'"),
        (["--method", "threshold", "--threshold-pass", "1.5"], 2, "flag --threshold-pass): is '1.5'"),
        (["--method", "typical", "--typical-delta", "0"], 2, "flag --typical-delta): is '0'"),
        (["--method", "block", "--support-size", "8", "--mode", "co-located"], 2, "--support-size"),
        (["--logprobs", "21"], 2, "flag --logprobs): is '21'"),
        (["--logprobs", "2", "--mode", "edge-only"], 2, "--logprobs"),
        (["--pipeline", "on", "--mode", "edge-only"], 2, "--pipeline on goes with --mode speculative"),
        (["--on-timeout", "panic"], 2, "on_timeout"),
        (["--transport", "pigeon"], 2, "transport"),
        (["--logit-bias", "5"], 2, "--logit-bias 5: want ID:B"),
        (["--logit-bias", "99999:1"], 2, "logit_bias"),
        (["--stop", ""], 2, "stop (--stop): has an empty string"),
        (["--stop-token-id", "99999"], 2, "stop_token_id (--stop-token-id): has 99999"),
        (["--bad-word", "\udcff"], 2, "text is not UTF-8, from its character 1 on"),
        (["--seed", "-1"], 2, "seed"),
        (["--verifier", "nowhere"], 2, "want HOST:PORT"),
        (
            ["--verifier", "127.0.0.1:9", "--on-timeout", "fail"],
            3,
            "cannot connect to a verifier at 127.0.0.1:9: connection refused",
        ),
        (["--draft", "/no/such/dir"], 2, "no draft at /no/such/dir"),
        (
            ["--draft-source", "medusa"],
            2,
            "medusa names a draft source of the verifier: it has an effect with",
        ),
        (["--draft", "8"], 2, "for the draft length give --num-speculative-tokens 8"),
        (["--draft", "/no/such/dir", "--mode", "cloud-only"], 2, "no tokenizer at /no/such/dir"),
        (["--mode", "co-located"], 4, "serve with --draft DIR"),
        (["--draft-strategy", "telepathy"], 2, "telepathy"),
        (["--config", "/no/such/file"], 2, "/no/such/file"),
    ],
)
def test_a_mistake_is_one_clear_line_and_an_exit_status(
    world: World, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    assert main(["run", "abc", *world.flags(*arguments)]) == status
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert shown.err.startswith("edge-client: ") and message in shown.err
    assert main(["run", "abc", *world.flags(*arguments), "--json"]) == status
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["exit_code"] == status and report["exact"] is None and message in report["error"]
    assert shown.err == f"edge-client: {report['error']}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "abc", "--bogus"], 2, "unrecognized arguments: --bogus"),
        (["run", ""], 2, "the prompt is empty"),
        (["run", "x", "--live"], 2, "--live and --json do not go together"),
        (["ps", "--listen", "127.0.0.1:1"], 3, "no daemon answers at 127.0.0.1:1"),
        (["doctor", "--config", "/no/such/file"], 2, "/no/such/file"),
        (["plan"], 2, ""),
        (["calibrate"], 2, ""),
    ],
)
def test_json_is_printed_whatever_ends_a_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    try:
        code = main([*arguments, "--json"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    report = json.loads(capsys.readouterr().out)
    assert code == report["exit_code"] == status and message in report["error"] and report["error"]


@pytest.mark.parametrize(("failure", "status"), [(KeyboardInterrupt(), 130), (RuntimeError("a bug"), 1)])
def test_json_is_printed_at_an_interrupt_and_a_bug_too(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    status: int,
) -> None:
    def fail(namespace: Any, output: Any) -> int:
        raise failure

    monkeypatch.setattr("outrider.edge_client.commands.cli._dispatch", fail)
    with contextlib.suppress(RuntimeError):
        assert main(["run", "x", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == status and report["exact"] is None and report["error"]


def test_json_is_printed_at_sigterm_before_there_is_a_session_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(namespace: Any, output: Any) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return 0

    monkeypatch.setattr("outrider.edge_client.commands.cli._dispatch", wait)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", "x", "--json"]) == 143 and signal.getsignal(signal.SIGTERM) is before
    report = json.loads(capsys.readouterr().out)
    assert report == {"exact": None, "error": "terminated", "exit_code": 143}


@pytest.mark.parametrize(
    ("failure", "status"),
    [(KeyboardInterrupt(), 130), (LinkError("gone"), 3), (RuntimeError("a bug"), 1)],
)
def test_what_goes_wrong_after_the_report_adds_no_second_object(
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    status: int,
) -> None:
    close = Edge.close

    def fail(edge: Edge) -> None:
        close(edge)
        raise failure

    monkeypatch.setattr(Edge, "close", fail)
    with contextlib.suppress(RuntimeError):
        assert main(["run", "def f(", *world.flags("--ignore-eos"), "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert len(report["token_ids"]) == 24 and report["exit_code"] == 0


def test_a_sigterm_after_the_report_adds_no_second_object(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Edge.close

    def wait(edge: Edge) -> None:
        close(edge)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(Edge, "close", wait)
    assert main(["run", "def f(", *world.flags("--ignore-eos"), "--json"]) == 143
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "length"


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "abc", "--temprature", "1"])
    shown = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and "edge-client run: error: unrecognized arguments: --temprature; did you mean --temperature?"
        in shown
    )
    assert "did you mean --temperature?" in shown
    with pytest.raises(SystemExit):
        main(["run", "abc", "--bogus"])
    assert "--bogus; edge-client run --help has those there are" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "abc", "def"])
    assert "def; text of several words goes in quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["run", "x", "--max-tokens", "5"], "--max-tokens; here it is --max-new-tokens"),
        (["run", "x", "-n", "5"], "-n; here it is --max-new-tokens"),
        (["run", "x", "--model=secret"], "--model; here it is --draft"),
        (["run", "x", "--draft-max", "8"], "--draft-max; here it is --num-speculative-tokens"),
        (["run", "x", "--recover-timeout", "8"], "--recover-timeout; here it is --recover-timeout-s"),
        (["serve", "--port", "80"], "--port; here it is --listen"),
        (["serve", "--served-model-name", "x"], "--served-model-name; here it is --model-name"),
        (["serve", "--stop-grace", "1"], "--stop-grace; here it is --stop-grace-s"),
        (["run", "x", "--max-num-seqs", "5"], "--max-num-seqs; edge-client run --help has"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_ours(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"unrecognized arguments: {hint}" in capsys.readouterr().err


def test_an_unknown_verb_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["rnu", "abc"])
    assert stop.value.code == 2 and "there is no verb 'rnu'; did you mean run?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["xyz"])
    assert "there is no verb 'xyz'; there are run, draft, config" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["draft"]])
def test_without_a_verb_help_is_printed(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    shown = capsys.readouterr()
    assert stop.value.code == 0 and "usage: edge-client" in shown.out and not shown.err


def test_help_lists_the_flags_used_most_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    flags = re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    most = ["--verifier", "--draft", "--mode", "--max-new-tokens", "--temperature", "--seed"]
    assert flags[flags.index("--config") + 1 :][:6] == most and len(set(flags)) == len(flags)


def test_an_empty_or_missing_prompt_is_refused(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "", *world.flags()]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    assert main(["run", "--prompt-file", str(tmp_path / "none"), *world.flags()]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["run", "--prompt-file", str(tmp_path / "binary"), *world.flags()]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors="surrogateescape")  # LANG=C
    monkeypatch.setattr("sys.stdin", latin)
    assert main(["run", "-", *world.flags()]) == 2
    assert "not UTF-8, from its character 4 on" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["run", *world.flags()]) == 2
    assert "no prompt: " in (shown := capsys.readouterr().err) and "`edge-client chat` holds" in shown


def test_a_prompt_longer_than_the_context_is_refused_and_the_verifier_goes_on(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "(" * 450, *world.flags()]) == 4
    assert "shorten the prompt" in capsys.readouterr().err
    run_json(capsys, "abc", *world.flags())


def test_a_draft_of_another_tokenizer_is_refused_in_one_sentence_with_the_fix(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    other = FakeBackend()
    with serving(other) as server:
        flags = world.flags("--verifier", f"127.0.0.1:{server.port}")
        assert main(["run", "abc", *flags]) == 5
    shown = capsys.readouterr().err
    assert "the draft's tokenizer is not the target's: name a draft of the target's family" in shown
    for fingerprint in (other.tokenizer_fingerprint, world.backend.tokenizer_fingerprint):
        assert fingerprint[:12] not in shown, "nobody can act on a fingerprint"


@pytest.mark.parametrize("logprob", [math.inf, -math.inf])
def test_an_infinite_logprob_of_a_verifier_is_one_clear_error(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, logprob: float
) -> None:
    def spoilt(*arguments: Any) -> tuple[TokenLogprobs, ...]:
        return tuple(replace(each, raw_logprob=logprob) for each in logprobs_of(*arguments))

    monkeypatch.setattr("outrider.cloud_verifier.engine.finish.logprobs_of", spoilt)
    assert main(["run", "def f(", *world.flags("--logprobs", "2"), "--json"]) == 4
    shown = capsys.readouterr()
    report = json.loads(shown.out, parse_constant=pytest.fail)  # what json.dumps writes of such a number
    assert report["exit_code"] == 4 and "logprobs: are not finite numbers" in report["error"]
    assert shown.err == f"edge-client: {report['error']}\n"


def test_an_error_in_mid_text_keeps_the_text_in_json(
    capsys: pytest.CaptureFixture[str], world: World
) -> None:
    backend = make_backend(world.draft)
    with serving(backend) as server:
        backend.fail_next = None
        flags = world.flags("--verifier", f"127.0.0.1:{server.port}", "--temperature", "0", "--json")
        failures = iter([RuntimeError("bug"), RuntimeError("bug")])
        forward = backend.forward

        def failing(items: Any) -> Any:
            if backend.num_forwards >= 3 and (failure := next(failures, None)):
                raise failure
            return forward(items)

        backend.forward = failing  # type: ignore[method-assign]
        assert main(["run", "abc", *flags]) == 4
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["finish_reason"] == "error" and 0 < len(report["token_ids"]) < 24
    assert "internal" in report["error"] and shown.err.count("edge-client: ") == 1
    assert report["exit_code"] == 4 and report["exact"] is True, "of what was generated"


# ---------------------------------------------------------------------------------- configuration


def test_config_show_says_where_a_value_comes_from(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edge.yaml").write_text("temperature: 0.5\nstop: ['a', 'b']\nsupport_size: 24\n")
    monkeypatch.setenv("OUTRIDER_EDGE_TOP_K", "20")
    arguments = ["config", "show", "--origin", "--config", str(tmp_path / "edge.yaml"), "--seed", "4"]
    assert main(arguments) == 0
    lines = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "0.5" in lines["temperature"] and "edge.yaml" in lines["temperature"]
    assert "20" in lines["top_k"] and "OUTRIDER_EDGE_TOP_K" in lines["top_k"]
    assert "24" in lines["support_size"] and "none" in lines["num_candidates"]
    assert "flag --seed" in lines["seed"] and "default" in lines["mode"]


def test_an_unknown_key_names_the_nearest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "edge.yaml").write_text("temprature: 0.5\n")
    assert main(["run", "abc", "--config", str(tmp_path / "edge.yaml")]) == 2
    assert "did you mean temperature?" in capsys.readouterr().err


# --------------------------------------------------------------------------------------- processes


def test_ctrl_c_keeps_the_text_closes_the_session_and_exits_130(world: World) -> None:
    backend = make_backend(world.draft)
    forward = backend.forward

    def slow(items: Any) -> Any:
        time.sleep(0.05)
        return forward(items)

    backend.forward = slow  # type: ignore[method-assign]
    with serving(backend) as server:
        for mode in ("speculative", "cloud-only"):
            flags = world.flags("--verifier", f"127.0.0.1:{server.port}", "--mode", mode)
            before = backend.num_forwards
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "outrider.edge_client",
                    "run",
                    "x",
                    *flags,
                    "--max-new-tokens",
                    "300",
                    "--json",
                ],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert eventually(lambda before=before: backend.num_forwards >= before + 5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert process.returncode == 130, err
            report = json.loads(out)
            assert report["finish_reason"] == "cancelled" and 1 <= len(report["token_ids"]) < 300
            assert "Traceback" not in err
            assert server.engine.num_sessions == 0 and backend.num_free_tokens == backend.kv_tokens


@pytest.mark.parametrize("flag", ["", "--json"])
def test_an_output_that_cannot_be_written_is_told_in_a_line(world: World, flag: str) -> None:
    backend = make_backend(world.draft)
    with serving(backend) as server, open("/dev/full", "w") as full:
        flags = world.flags(
            "--verifier", f"127.0.0.1:{server.port}", "--mode", "cloud-only", *filter(None, [flag])
        )
        found = subprocess.run(
            [sys.executable, "-m", "outrider.edge_client", "run", "x", *flags, "--max-new-tokens", "60"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,  # where the session is not closed before the interpreter ends, it never does
        )
        assert found.returncode == 1 and "Traceback" not in found.stderr
        assert (
            found.stderr.splitlines()[-1] == "edge-client: cannot write the output: No space left on device"
        )
        assert eventually(lambda: server.engine.num_sessions == 0)


_BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "onnx", "safetensors") or "cloud_verifier" in name:
            raise ImportError(f"{name} is blocked here")
sys.meta_path.insert(0, Blocker())
import socket
connect = socket.socket.connect
def refuse(*args):
    raise AssertionError(f"a connection from Python: {args}")
socket.socket.connect = refuse
from outrider.edge_client.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_edge_runs_without_torch_and_transformers(world: World) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _BLOCKER, "run", "def f(", *world.flags("--json", "--on-timeout", "wait")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    assert len(json.loads(process.stdout)["token_ids"]) > 0


@pytest.mark.parametrize("verb", [["config", "show"], ["chat"], ["serve"]])
def test_a_flag_that_a_verb_lacks_is_not_taken_for_a_longer_one(
    verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*verb, "--json"])  # which --json-whitespace begins with
    assert caught.value.code == 2 and "--json" in capsys.readouterr().err


def test_help_of_serve_has_its_own_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, defaults in {"run": ("first_token", "warning"), "serve": ("wait", "info")}.items():
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        shown = " ".join(capsys.readouterr().out.split())
        of_flags = [shown.partition(f" {flag} ")[2] for flag in ("--on-timeout", "--log-level")]
        found = tuple(text.partition("(default: '")[2].partition("'")[0] for text in of_flags)
        assert found == defaults


def test_help_explains_every_method_under_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    exact, _, approximate = shown.partition("verification method. Exact: ")[2].partition("Approximate: ")
    for method in Method:
        assert f"{method} (" in (exact if method.is_exact else approximate.partition("(default:")[0])


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from outrider.edge_client.commands.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'grpc', 'onnxruntime', 'tokenizers', 'torch', 'yaml', 'google'}\n"
        "heavy &= set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "HEAVY []"
    for flag in ("--num-speculative-tokens", "--on-timeout", "--logit-bias", "--recover-timeout-s", "--json"):
        assert flag in process.stdout


def test_a_reader_that_goes_away_is_no_error_of_ours(world: World) -> None:
    flags = " ".join(world.flags("--max-new-tokens", "300", "--seed", "1"))
    command = f"{sys.executable} -m outrider.edge_client run x {flags} | head -c 1"
    process = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, timeout=100)
    assert process.returncode == 0 and process.stderr == b""
