"""`--learn`: a draft that changes while it drafts leaves the text as it is, with faults on the link too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.faults import Faults, FaultyLink
from support.processes.pairs import Pair

from outrider.common.config.loader import with_values
from outrider.edge_client.config.run_config import RunConfig, run_config
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.session.factory import Surroundings, create_edge, create_link
from outrider.experiments.shared.processes import VerifierProcess

PROMPT = tuple(range(3, 12))


def write(config: RunConfig, faults: Faults | None = None) -> list[tuple[int, ...]]:
    def link(config: RunConfig, session_id: bytes):  # type: ignore[no-untyped-def]
        found = create_link(config, session_id)
        return FaultyLink(found, faults) if faults else found

    edge = create_edge(config, surroundings=Surroundings(create_link=link))
    texts = []
    try:
        for seed in (1, 2):
            if edge.learner is not None and edge.learner.head is not None:
                edge.learner.head.gain = 1.0  # it drafts, whatever it is worth
            session = edge.session(PROMPT, seed)
            list(session.generate())
            texts.append(session.result.token_ids)
            if edge.learner is not None:
                assert session.result.stats.num_learned_tokens > 10
                assert 0 < session.result.stats.learn_bytes_down < session.result.stats.bytes_down
    finally:
        edge.close()
    return texts


def test_texts_are_cloud_onlys_while_the_head_drafts(
    tiny_verifier: VerifierProcess, tiny_pair: Pair, tmp_path: Path
) -> None:
    values = {"verifier": tiny_verifier.address, "draft": str(tiny_pair.random_draft), "temperature": 0.8}
    base = with_values(run_config(), **values, max_new_tokens=40, ignore_eos=True, on_timeout="wait")
    whole = write(with_values(base, mode="cloud-only"))
    config = with_values(base, mode="speculative", learn=tmp_path)
    assert write(with_values(config, tree="off")) == whole
    assert write(with_values(config, tree=16)) == whole
    faults = Faults(lose_reply=frozenset({3}), drop_stream=frozenset({5}))
    assert write(with_values(config, num_speculative_tokens=2, timeout_ms=400), faults) == whole
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("num_asked", [0, 2])
def test_log_probabilities_are_those_that_were_asked_for(
    tiny_verifier: VerifierProcess, tiny_pair: Pair, tmp_path: Path, num_asked: int
) -> None:
    values = {"verifier": tiny_verifier.address, "draft": str(tiny_pair.random_draft), "learn": tmp_path}
    config = run_config(**values, mode="speculative", max_new_tokens=8, ignore_eos=True, logprobs=num_asked)
    edge = create_edge(config)
    session = edge.session(PROMPT, 1)
    events = [event for event in session.generate() if isinstance(event, TokenEvent)]
    edge.close()
    told = [*session.result.logprobs, *(event.logprobs for event in events)]
    assert [0 if each is None else len(each.top_token_ids) for each in told] == [num_asked] * 16
    assert session.result.stats.num_learned_tokens > 0


def test_the_command_learns_shows_and_resets(
    tiny_verifier: VerifierProcess, tiny_pair: Pair, tmp_path: Path
) -> None:
    def edge(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "outrider.edge_client", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    run = [
        "run",
        "--verifier",
        tiny_verifier.address,
        "--draft",
        str(tiny_pair.own_draft),
        "--learn",
        str(tmp_path),
    ]
    run += ["--mode", "speculative", "--max-new-tokens", "24", "--ignore-eos", "--json", "def f"]
    done = edge(*run)
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)["stats"]
    assert stats["num_learned_tokens"] > 0 and stats["learn_bytes_down"] > 0
    assert "tokens judged: overlap with the target" in edge("draft", "learned", "show", str(tmp_path)).stdout
    refused = edge(*run, "--method", "sparse")
    assert refused.returncode == 2 and "goes with --method coupled" in refused.stderr
    assert "removed" in edge("draft", "learned", "reset", str(tmp_path)).stdout
    assert not list(tmp_path.iterdir())
