"""Requests as LangChain and LiteLLM send them, recorded: chats, streams, schemas, tool loops, several choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon
from support.grammars import TOKENIZER  # noqa: F401 - skips without llguidance

from outrider.cloud_verifier.server.server import VerifierServer

HERE = Path(__file__).parent
RECORDED: list[dict[str, Any]] = json.loads((HERE / "recorded_requests.json").read_text())

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def process(verifier: VerifierServer) -> Iterator[DaemonProcess]:
    flags = ("--chat-template", str(HERE / "templates" / "qwen2_5.jinja"))
    with running_daemon(f"127.0.0.1:{verifier.port}", *flags) as process:
        yield process


def message_of(answer: httpx.Response, index: int) -> dict[str, Any]:
    """A choice's message, put together from its chunks where it was streamed."""
    if answer.headers["content-type"].startswith("application/json"):
        choice: dict[str, Any] = answer.json()["choices"][index]
        return choice.get("message", {"content": choice.get("text")})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    content, calls = "", list[dict[str, Any]]()
    for delta in (each["choices"][0]["delta"] for each in chunks if each["choices"]):
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append(call)
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"content": content, "tool_calls": calls}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: each["client"])
def test_a_recorded_request_gets_what_its_client_reads(
    process: DaemonProcess, recorded: dict[str, Any]
) -> None:
    body = recorded["body"]
    answer = httpx.post(process.url + recorded["path"], json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "x-outrider-warning" not in answer.headers, "no field is unknown"
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else [""]
    for index in range(body.get("n", 1) * len(prompts)):
        message = message_of(answer, index)
        if body.get("tool_choice") not in (None, "none", "auto"):
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
            for call in message["tool_calls"]:
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, schemas[call["function"]["name"]])
            assert message["tool_calls"] and not message["content"]
        else:
            assert isinstance(message["content"], str)
        if schema := body.get("response_format", {}).get("json_schema", {}).get("schema"):
            jsonschema.validate(json.loads(message["content"]), schema)
