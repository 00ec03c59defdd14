"""What is wrong on the command line is refused before anything is loaded, by the flag that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.cloud_verifier.server.cli import main

SERVE = ["serve", "--listen", "127.0.0.1:0", "--admin-listen", "none"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "{}/none"], "--target: no model directory at"),
        (["--target", "{}"], "has no config.json: want a Hugging Face directory"),
        (["--draft", "{}/none"], "/none: there is no such directory: `edge-client draft export` makes one"),
        (
            ["--heads", "{}/none"],
            "/none: there is no such directory: `python -m outrider.training.heads` makes",
        ),
    ],
)
def test_a_directory_without_a_model_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([*SERVE, *(each.format(tmp_path) for each in flags)]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("cloud-verifier: --") and message in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model", "--target"),
        ("--max-model-len", "--session-max-tokens"),
        ("--ctx-size", "--session-max-tokens"),
        ("--max-num-seqs", "--max-sessions"),
        ("--max-num-batched-tokens", "--max-step-tokens"),
        ("--gpu-memory-utilization", "--kv-memory"),
        ("--host", "--listen"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_ours(
    theirs: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*SERVE, theirs, "1"])
    assert f"unrecognized arguments: {theirs}; here it is {ours}" in capsys.readouterr().err
