"""A client that nobody here wrote, in another language, over the .proto file alone: gRPC for Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.dev_security import make_dev_security
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig

HERE = Path(__file__).parent / "node"
PROTO = Path(__file__).resolve().parents[3] / "proto"
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """client.js in a directory with the packages that package.json names."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node, or no npm, on this machine")
    directory = tmp_path_factory.mktemp("node")
    for name in ("package.json", "client.js", "health.proto"):
        shutil.copy(HERE / name, directory)
    command = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=90, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the packages of tests/security/node/package.json in time")
    if done.returncode:
        pytest.skip(f"npm could not install tests/security/node/package.json: {done.stderr[-300:]}")
    return directory / "client.js"


def run(client: Path, port: int, ca: Path, token: str, draft: list[int]) -> Any:
    command = ["node", str(client), f"localhost:{port}", str(ca), str(PROTO), token, *map(str, draft)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def greedy(backend: FakeBackend, text: list[int]) -> int:
    return int(np.argmax(backend.logits_after(text)[: backend.num_tokens]))


def test_a_node_client_verifies_a_draft_over_tls_with_a_token_and_is_refused_without(
    client: Path, tmp_path: Path
) -> None:
    backend = FakeBackend()
    first = greedy(backend, PROMPT)
    second = greedy(backend, [*PROMPT, first])
    third = greedy(backend, [*PROMPT, first, second])
    wrong = (third + 1) % backend.num_tokens
    security = make_dev_security(tmp_path, "acme")
    certificate, key = security.certificates.server
    config = ServeConfig(tls_cert=certificate, tls_key=key, tokens=security.tokens_file)
    ca, token = security.certificates.ca, security.token_file.read_text().strip()
    with serving(backend, config) as server:
        answers = run(client, server.port, ca, token, [second, wrong])
        refused = run(client, server.port, ca, "-", [second, wrong])
        mistaken = run(client, server.port, ca, token[:-1] + ("A" if token[-1] != "A" else "B"), [1])

    assert answers["health"] == {"status": "SERVING"}
    assert answers["describe"]["model_id"] == "fake" and answers["open"]["opened"]["position"] == 4
    stream = answers["stream"]
    assert (stream["position"], stream["firstToken"], stream["wasOpen"]) == (4, first, True)
    verdict = stream["verdict"]
    assert (verdict["accepted_len"], verdict["correction"], verdict["position"]) == (1, third, 6)

    for answer, reason in ((refused, "the call has no token"), (mistaken, "no such token is known here")):
        assert answer["health"] == {"status": "SERVING"}
        for call in ("describe", "open", "stream"):
            assert answer[call] == {"code": "UNAUTHENTICATED", "details": reason}
    assert not len(server.engine.sessions)
