"""`edge-client calibrate` as a user types it, with a tiny draft and a served target that is made up."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.edge_client.calibration.measuring import target_nats
from outrider.edge_client.commands.cli import main
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.gate.file import read_gate_file
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink

TEXT = "def function_7(self, value_21): return value_9 + 49\n" * 40


@dataclass
class World:
    draft: Path
    backend: FakeBackend
    address: str
    text: Path

    def flags(self, out: Path, *more: str) -> list[str]:
        short = ["--passages", "4", "--prompt-tokens", "12", "--new-tokens", "20", "--out", str(out)]
        return ["calibrate", "--text", str(self.text), "--draft", str(self.draft), *short, *more]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("calibrate")
    draft = make_tiny_draft(root)
    backend = make_backend(draft)
    (root / "text.py").write_text(TEXT)
    with serving(backend) as server:
        yield World(draft, backend, f"127.0.0.1:{server.port}", root / "text.py")


def run_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    status = main([*arguments, "--json"])
    out = capsys.readouterr()
    assert status == 0, out.err
    report = json.loads(out.out)
    assert isinstance(report, dict)
    return report


def test_thresholds_need_no_verifier(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gate.yaml"
    report = run_json(capsys, world.flags(out, "--gate-rules", "digits,rare", "--percentile", "75"))
    content = read_gate_file(out)
    assert report["thresholds"].keys() == {"nll", "entropy", "margin"} and report["curve"] is None
    assert report["thresholds"]["nll"] == content.nll and content.rules == ("digits", "rare")
    assert content.source["percentile"] == 75 and content.source["text"] == ["text.py"]
    assert content.word_counts is not None and content.word_counts.counts["self"] == 40
    for share in report["hard_share_of"].values():
        assert share == pytest.approx(0.25, abs=0.02)
    assert report["right_of_easy"] is None, "the text's own tokens judge nothing"


def test_the_file_serves_the_run_and_another_draft_refuses_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gate.yaml"
    assert main(world.flags(out, "--gate-rules", "rare")) == 0
    assert f"edge-client run --gate stop|commit --gate-file {out}" in capsys.readouterr().out
    run = ["run", "def f(", "--verifier", world.address, "--draft", str(world.draft), "--seed", "7"]
    run += ["--max-new-tokens", "16", "--json", "--gate-file", str(out)]
    assert main([*run, "--gate", "stop"]) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True
    out.write_text(out.read_text().replace("draft_fingerprint: ", "draft_fingerprint: '0'  # "))
    assert main([*run, "--gate", "stop"]) == 2
    assert "calibrate" in capsys.readouterr().err


def test_the_variance_is_looked_at_where_it_is_asked_for_and_the_draft_can_tell_it(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, draft = tmp_path / "gate.yaml", tmp_path / "draft"
    shutil.copytree(world.draft, draft)
    flags = world.flags(out, "--draft", str(draft), "--variance")
    assert main(flags) != 0 and "edge-client draft add-dropout" in capsys.readouterr().err
    add_dropout(draft)
    variance = run_json(capsys, flags)["thresholds"]["variance"]
    assert variance > 0 and read_gate_file(out).variance == variance
    curve = ["--verifier", world.address, "--curve", "80", "--passages", "1"]
    assert run_json(capsys, [*flags, *curve])["curve"]["points"][-1]["calls_saved"] > 0.5


def test_a_verifier_adds_the_curve_from_nothing_saved_to_nearly_all(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = world.flags(tmp_path / "gate.yaml", "--verifier", world.address, "--curve", "80,20,60")
    flags += ["--depth-policy", "fixed"]  # others choose by what is timed, and so how many calls there are
    csv, svg = tmp_path / "curve.csv", tmp_path / "curve.svg"
    report = run_json(capsys, [*flags, "--csv", str(csv), "--svg", str(svg), "--seed", "3"])
    points = report["curve"]["points"]
    assert [point["setting"] for point in points] == ["no gate", "20", "60", "80", "keep all"]
    first, last = points[0], points[-1]
    assert first["calls_saved"] == first["kept_share"] == 0 and first["share_equal"] == 1
    assert first["target_nats"] == pytest.approx(report["curve"]["cloud_only_nats"])
    assert last["calls_saved"] > 0.8 and last["kept_share"] > 0.8
    assert last["share_equal"] < 1 and last["target_nats"] > first["target_nats"]
    saved = [point["calls_saved"] for point in points]
    assert saved == sorted(saved)
    assert report["source"]["target_fingerprint"] == world.backend.fingerprint
    assert 0 <= report["right_of_hard"] <= 1
    assert len(csv.read_text().splitlines()) == 6
    assert svg.read_text().startswith("<svg") and "cloud-only" in svg.read_text()


def test_the_target_s_loss_of_any_text_is_that_of_its_own_logits(world: World) -> None:
    prompt, text = [5, 6, 7], list(range(40, 75))
    link = GrpcLink(world.address, session_id := new_session_id())
    nats = target_nats(link, session_id, prompt, text)
    expected = 0.0
    for index, token_id in enumerate(text):
        logits = world.backend.logits_after([*prompt, *text[:index]])[: world.backend.num_tokens]
        logits = logits.astype(np.float64)
        expected += math.log(np.exp(logits - logits.max()).sum()) - (logits[token_id] - logits.max())
    assert nats == pytest.approx(expected, rel=1e-5)


def test_a_verifier_that_offers_too_little_leaves_the_loss_out(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = make_backend(world.draft)
    with serving(backend, ServeConfig(methods="coupled")) as server:
        address = f"127.0.0.1:{server.port}"
        flags = world.flags(tmp_path / "gate.yaml", "--verifier", address, "--curve", "80")
        assert main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("80 ")]
    assert row.endswith(" -") and any(line.startswith("keep all") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--percentile", "100"], "--percentile 100: want a percentile between 0 and 100"),
        (["--curve", "80,x", "--verifier", "127.0.0.1:1"], "--curve 80,x: want percentiles with commas"),
        (["--curve", "80,0", "--verifier", "127.0.0.1:1"], "--curve 0: want a percentile"),
        (["--svg", "curve.svg"], "--svg: there is no curve: it takes a --verifier"),
        (["--csv", "c.csv", "--curve", "none", "--verifier", "127.0.0.1:1"], "--csv: there is no curve"),
        (["--out", "/nowhere/gate.yaml"], "--out /nowhere/gate.yaml: there is no directory /nowhere"),
        (["--passages", "0"], "--passages 0: want more"),
        (["--gate-rules", "numbers"], "unknown gate rule 'numbers'"),
        (["--gate-rare-per-million", "5"], "--gate-rare-per-million goes with the rule rare"),
        (["--text", "/nowhere/text"], "--text /nowhere/text: No such file or directory"),
    ],
)
def test_bad_flags_are_named_before_anything_takes_time(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(world.flags(tmp_path / "gate.yaml", *flags)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "gate.yaml").exists()


def test_a_verifier_that_is_not_there_is_said_at_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(world.flags(tmp_path / "gate.yaml", "--verifier", "127.0.0.1:9")) == 3
    assert "connection refused" in capsys.readouterr().err
    assert not (tmp_path / "gate.yaml").exists()


def test_another_draft_than_the_embedded_needs_a_text(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--draft", str(world.draft), "--out", str(tmp_path / "gate.yaml")]) == 2
    assert "--text FILE ...: name some text" in capsys.readouterr().err
