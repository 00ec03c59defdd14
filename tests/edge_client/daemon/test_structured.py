"""The daemon with clients that want structured output, and with requests as other programs send them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from support.daemon.daemons import DaemonProcess
from support.grammars import TOKENIZER  # noqa: F401 - skips without llguidance

import outrider
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.commands.cli import main


class Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["file", "socket"]
    sizes: list[Literal[1, 2, 3]] = pydantic.Field(min_length=2, max_length=3)
    name: str = pydantic.Field(max_length=8)


MESSAGES: Any = [{"role": "user", "content": "Describe a file."}]


def test_the_parse_helper_of_openai_gets_its_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="outrider", messages=MESSAGES, response_format=Entry, max_tokens=64, seed=1
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Entry)


@pytest.mark.parametrize("mode", ["speculative", "cloud-only", "edge-only"])
def test_a_stream_obeys_in_every_mode(client: openai.OpenAI, mode: str) -> None:
    with client.chat.completions.stream(
        model="outrider",
        messages=MESSAGES,
        response_format=Entry,
        max_tokens=64,
        seed=2,
        extra_body={"outrider": {"mode": mode}},
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Entry)


def test_a_text_that_is_cut_is_the_beginning_of_one_that_obeys(client: openai.OpenAI) -> None:
    def text(num: int) -> str:
        answer = client.chat.completions.create(
            model="outrider",
            messages=MESSAGES,
            response_format={"type": "json_object"},
            max_tokens=num,
            seed=3,
        )
        return answer.choices[0].message.content or ""

    assert text(3).startswith("{") and text(24).startswith(text(3))


def test_vllms_fields_constrain_a_completion(client: openai.OpenAI) -> None:
    def text(**fields: object) -> str:
        answer = client.completions.create(
            model="outrider", prompt="x = ", max_tokens=40, seed=4, extra_body=fields
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert text(guided_choice=["red.", "green|"]) in ("red.", "green|")
    assert text(guided_choice=["", "a"]) in ("", "a") and text(guided_choice=[""]) == ""
    assert re.fullmatch(r"[a-c]{3,5}", text(guided_regex="[a-c]{3,5}"))
    assert re.fullmatch(r"(ab)+c", text(structured_outputs={"grammar": 'start: ("ab")~1..4 "c"'}))
    assert json.loads(text(guided_json={"enum": [{"a": 1}, {"b": 2}]})) in ({"a": 1}, {"b": 2})


@pytest.mark.parametrize("temperature", [0, 1])
def test_where_bad_words_leave_a_grammar_nothing_the_text_ends(
    client: openai.OpenAI, temperature: float
) -> None:
    def text(mode: str) -> str:
        body = {"guided_regex": "[ab]{2}c", "bad_words": ["c"], "outrider": {"mode": mode}}
        answer = client.completions.create(
            model="outrider", prompt="x = ", max_tokens=8, seed=4, temperature=temperature, extra_body=body
        )
        return answer.choices[0].text

    assert text("speculative") == text("cloud-only")
    assert all(re.fullmatch("[ab]{2}", text(mode)) for mode in ("speculative", "cloud-only", "edge-only"))


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "grammar"),
        ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
        ({"guided_regex": "(ab"}, "guided_regex", "unclosed group"),
        ({"outrider": {"regex": "("}}, "outrider.regex", "unclosed group"),
        ({"guided_json": {"type": "integer", "multipleOf": 99999989}}, "guided_json", "to compile: simplify"),
    ],
)
def test_a_bad_grammar_is_a_400_that_names_the_place(
    client: openai.OpenAI, fields: dict[str, object], param: str, word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="outrider", prompt="x", max_tokens=4, extra_body=fields)
    assert param in (caught.value.param or "") and word in str(caught.value)


# As GuideLLM 0.3 and `vllm bench serve` 0.10 send them.
GUIDELLM = {
    "model": "outrider",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Describe a file."}]}],
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 6,
    "max_tokens": 6,
    "stop": None,
    "ignore_eos": True,
}
VLLM_BENCH = {
    "model": "outrider",
    "prompt": "x = ",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 6,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("route", "body"), [("chat/completions", GUIDELLM), ("completions", VLLM_BENCH)], ids=["guidellm", "vllm"]
)
def test_requests_of_load_generators_are_served(
    daemon: DaemonProcess, route: str, body: dict[str, object]
) -> None:
    answer = httpx.post(f"{daemon.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 200 and "x-outrider-warning" not in answer.headers
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_unknown_field_is_ignored_with_a_warning(daemon: DaemonProcess, is_stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 1, "temprature": 1, "gr\u00f6\u00dfe\n": 2, "stream": is_stream}
    answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["x-outrider-warning"] == "ignored unknown fields: temprature, gr??e?"


COLOURS = {"enum": ["red", "green"]}


def test_the_command_reads_its_grammars_from_files(
    verifier: VerifierServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(COLOURS))
    lark.write_text('start: "a"~3')
    base = ["run", "x = ", "--verifier", f"127.0.0.1:{verifier.port}", "--seed", "1", "--json"]
    for flags, texts in (
        (["--json-schema", str(schema)], ('"red"', '"green"')),
        (["--grammar", str(lark)], ("aaa",)),
        (["--regex", "b{2}"], ("bb",)),
    ):
        assert main([*base, *flags]) == 0
        assert json.loads(capsys.readouterr().out)["text"] in texts
    for flags, word in (
        (["--json-schema", str(tmp_path / "none")], "--json-schema: cannot read"),
        (["--regex", "a", "--grammar", str(lark)], "--regex and --grammar do not go together"),
        (["--json-schema", str(lark)], "json_schema (--json-schema): json_schema: not a JSON schema"),
    ):
        assert main([*base, *flags]) == 2
        assert word in json.loads(capsys.readouterr().out)["error"]


def test_the_python_client_takes_a_dictionary_a_text_and_a_path(
    verifier: VerifierServer, tmp_path: Path
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(COLOURS))
    with outrider.connect(f"127.0.0.1:{verifier.port}") as client:
        written = {
            client.generate("x = ", seed=1, json_schema=each).text
            for each in (COLOURS, path.read_text(), path)
        }
        assert len(written) == 1 and written <= {'"red"', '"green"'}
        assert client.generate("x = ", seed=1, regex="[a-c]{4}", temperature=0.0).text.isalpha()
        with pytest.raises(outrider.UsageError, match="unclosed group"):
            client.generate("x = ", regex="(")
        with pytest.raises(outrider.OutriderError, match="regex is empty"):
            client.generate("x = ", regex="")
        for given in ({"json_schema": tmp_path / "none"}, {"regex": "\ud800"}):
            with pytest.raises(outrider.OutriderError, match="cannot be read"):
                client.generate("x = ", **given)
