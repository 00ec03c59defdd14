"""`--draft-backend torch` with every verb and way to draft; the edge without it never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

from outrider.common.config.loader import Loaded, with_values
from outrider.edge_client.commands.cli import main
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.daemon.service import Daemon


@dataclass
class World:
    draft: Path  # exported
    source: Path  # what it was exported from
    address: str

    def flags(self, *more: str) -> list[str]:
        common = ("--draft", str(self.source), "--draft-backend", "torch", "--draft-device", "cpu")
        ends = ("--max-new-tokens", "24", "--on-timeout", "wait", "--seed", "7")
        return ["--verifier", self.address, *common, *ends, *more]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("torch")
    draft = make_tiny_draft(root)
    with serving(make_backend(draft)) as server:
        yield World(draft, root / "source", f"127.0.0.1:{server.port}")


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["run", "def f(", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


WAYS = {
    "usual": (),
    "trees, fp8 KV": ("--tree", "8", "--draft-kv-dtype", "fp8"),
    "pipelined, fp8": ("--mode", "speculative", "--pipeline", "on", "--draft-weights", "fp8"),
    "gate, bfloat16": ("--gate", "stop", "--gate-entropy", "8.5", "--draft-weights", "bfloat16"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_draft_writes_cloud_onlys_text(
    way: str, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud_only = run_json(capsys, *world.flags("--mode", "cloud-only"))
    found = run_json(capsys, *world.flags(*WAYS[way]))
    assert found["token_ids"] == cloud_only["token_ids"] and found["num_unverified_tokens"] == 0
    assert found["draft_runtime"].startswith(f"torch {torch.__version__} on cpu")
    assert cloud_only["draft_runtime"] is None


def test_sparse_supports_and_edge_only_text_come_from_it_too(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys, *world.flags("--method", "sparse"))["exact"]
    alone = run_json(capsys, *world.flags("--mode", "edge-only"))
    assert alone["num_unverified_tokens"] == 24
    assert alone["token_ids"] == run_json(capsys, *world.flags("--mode", "edge-only"))["token_ids"]


def test_the_doctor_says_what_computes_the_draft(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", *world.flags("--draft-weights", "fp8")]) == 0
    (found,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["check"] == "draft")
    assert "fp8 weights" in found["facts"]["runtime"] and "float32 KV" in found["found"]
    assert (
        main(["doctor", "--draft", str(world.draft), "--verifier", world.address, "--mode", "edge-only"]) == 0
    )
    assert "onnxruntime" in capsys.readouterr().out
    assert main(["doctor", *world.flags("--draft", str(world.draft))]) == 1
    assert "-> name a Hugging Face directory with --draft" in capsys.readouterr().out


def test_a_daemon_loads_a_hugging_face_directory_for_requests_that_draft(world: World) -> None:
    values = {"verifier": world.address, "draft": str(world.source), "draft_backend": "torch"}
    config = with_values(RunConfig(), **values, draft_device="cpu", mode="cloud-only")
    daemon = Daemon(lambda: Loaded(config, {}))
    try:
        assert daemon.edge.draft is not None and daemon.edge.draft.max_context == 512
    finally:
        daemon.close()


def test_export_checks_itself(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "export", str(world.source), str(tmp_path), "--self-check"]) == 0
    shown = capsys.readouterr().out
    assert "self-check on 128 tokens" in shown and "acceptance against the source" in shown
    assert "with its weights in int" in shown and "the source in torch" in shown
