"""A daemon that was started with a commit-gate: what it tells, and what a request may say about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon

from outrider.cloud_verifier.server.server import VerifierServer

GATE = ("--gate", "commit", "--gate-entropy", "2.5", "--gate-max-hard-ratio", "0.5")


@pytest.fixture(scope="module")
def gated(verifier: VerifierServer) -> Iterator[DaemonProcess]:
    with running_daemon(f"127.0.0.1:{verifier.port}", *GATE, "--on-timeout", "wait") as process:
        yield process


@pytest.fixture(scope="module")
def asked(gated: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gated.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def complete(client: openai.OpenAI, **outrider: object) -> tuple[str, dict[str, Any]]:
    answer = client.completions.create(
        model="outrider",
        prompt="def read_lines(path):\n",
        max_tokens=48,
        seed=7,
        temperature=0,
        extra_body={"outrider": {"ignore_eos": True, **outrider}},
    )
    assert answer.usage is not None and answer.usage.model_extra is not None
    return answer.choices[0].text, answer.usage.model_extra["outrider"]


def test_the_usage_block_counts_what_was_kept(asked: openai.OpenAI) -> None:
    _, own = complete(asked)
    assert own["gate"] == "commit" and own["exact"] is False
    assert own["num_gate_tokens"] == own["num_unverified_tokens"] > 0 < own["num_kept_blocks"]
    assert 0 < own["verifier_calls_per_token"] < 1 and 0 <= own["hard_ratio"] < 1


def test_a_stream_marks_the_tokens_that_were_kept(asked: openai.OpenAI, gated: DaemonProcess) -> None:
    chunks = asked.completions.create(
        model="outrider",
        prompt="def read_lines(path):\n",
        max_tokens=48,
        seed=7,
        temperature=0,
        stream=True,
        extra_body={"outrider": {"tokens": True, "ignore_eos": True}},
    )
    told = [each.model_extra["outrider"]["tokens"] for each in chunks if each.model_extra.get("outrider")]  # type: ignore[union-attr]
    tokens = [token for each in told for token in each]
    kept = [token for token in tokens if token["origin"] == "gate"]
    assert kept and len(tokens) == 48
    assert [token["verified"] for token in tokens] == [token["origin"] != "gate" for token in tokens]
    metrics = gated.get("/metrics").decode()
    assert 'outrider_edge_tokens_total{origin="gate"}' in metrics
    assert 'outrider_edge_gate_blocks_total{result="kept"}' in metrics


@pytest.mark.parametrize(
    "outrider",
    [{"gate": "off"}, {"mode": "cloud-only"}, {"pipeline": "on"}],
    ids=lambda outrider: json.dumps(outrider),
)
def test_a_request_does_without_where_it_says_so_or_has_no_place_for_it(
    asked: openai.OpenAI, client: openai.OpenAI, outrider: dict[str, object]
) -> None:
    text, own = complete(asked, **outrider)
    assert own["gate"] == "off" and own["exact"] is True and own["num_gate_tokens"] == 0
    assert text == complete(client)[0], "as a daemon without a gate writes it"


def test_a_request_may_have_a_gate_of_its_own(asked: openai.OpenAI, client: openai.OpenAI) -> None:
    text, own = complete(client, mode="speculative", gate="stop", gate_margin=0.3, gate_rules=["digits"])
    assert own["gate"] == "stop" and own["exact"] is True and own["num_escalations"] > 0
    assert text == complete(client)[0]
    _, own = complete(asked, gate_entropy=0)
    assert own["gate"] == "commit" and own["num_gate_tokens"] < complete(asked)[1]["num_gate_tokens"]


@pytest.mark.parametrize(
    ("outrider", "words"),
    [
        ({"gate": "commit", "gate_nll": 1, "pipeline": "on"}, "does not go with pipeline on"),
        ({"gate_nll": 1}, "gate_nll goes with gate stop"),
        ({"gate": "stop"}, "has no criterion"),
        ({"gate": "never"}, "one of off, stop, commit"),
        ({"gate_file": "/etc/passwd"}, "unknown parameter outrider.gate_file"),
    ],
)
def test_a_gate_that_cannot_work_is_refused(
    client: openai.OpenAI, outrider: dict[str, object], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        complete(client, **outrider)
