"""The examples of `SpeculativeDecoder` in docs/library.md run, on directories and with a remote target."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.server import serving

from benchmarks.library.page import (
    NAMES,
    decoder_examples,
    expected_lines,
    make_folder,
    run_example,
    serve_config,
)
from outrider.cloud_verifier.server.loading import load_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("page") / "here")


def run_all(target: str = "") -> None:
    names: dict[str, object] = {}
    for _, example in zip(NAMES, decoder_examples(), strict=True):
        assert run_example(example, names, target) == expected_lines(example) != []


@pytest.mark.slow
@pytest.mark.ci
def test_the_examples_print_what_the_page_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run_all()


@pytest.mark.slow
def test_they_do_so_with_a_remote_target(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    config = serve_config(folder)
    backend, drafter = load_models(config, None)
    with serving(backend, config, drafter) as server:
        run_all(f"grpc://127.0.0.1:{server.port}")
