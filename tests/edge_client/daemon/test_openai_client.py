"""The daemon with a client nobody here wrote: the `openai` package, streaming and not."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.request

import openai
import pytest
from support.daemon.daemons import DaemonProcess

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.experiments.shared.processes import run_edge

PROMPT = "def read_lines(path):\n"
MODEL = "outrider"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Write a function."}]


def complete(client: openai.OpenAI, **options: object) -> openai.types.Completion:
    options = {"max_tokens": 32, "seed": 7, "prompt": PROMPT, **options}
    return client.completions.create(model=MODEL, **options)  # type: ignore[call-overload]


def test_a_completion_has_the_text_of_edge_client_run_with_the_same_seed(
    client: openai.OpenAI, verifier: VerifierServer
) -> None:
    answer = complete(client)
    verifier_flags = ("--verifier", f"127.0.0.1:{verifier.port}", "--on-timeout", "wait")
    done = run_edge(["run", *verifier_flags, "--json", "--seed", "7", "--max-new-tokens", "32", PROMPT])
    ran = json.loads(done.stdout)
    assert answer.choices[0].text == ran["text"]
    assert answer.choices[0].finish_reason == ran["finish_reason"] == "length"
    assert answer.system_fingerprint == f"fp_{ran['target_fingerprint'][:12]}"
    own = answer.usage.model_extra["outrider"]  # type: ignore[union-attr]
    assert own["exact"] and own["reproducible"] and own["seed"] == 7 and own["bytes_up"] > 0
    assert own["stretches"][0]["reason"] == "fastest"
    for each in own["stretches"]:
        assert {"speculative", "cloud-only"} <= each["expected_ms"].keys()
    assert sum(each["num_tokens"] for each in own["stretches"]) == len(ran["token_ids"])
    assert answer.usage.completion_tokens == len(ran["token_ids"])  # type: ignore[union-attr]


def test_a_stream_has_the_same_text_and_tells_its_usage_last(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))  # type: ignore[arg-type]
    whole = complete(client)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == 32
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 3


def test_a_stop_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = complete(client).choices[0].text
    stop = whole[20:23]
    cut = complete(client, stop=[stop, "never occurs"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].text for chunk in complete(client, stop=stop, stream=True)]  # type: ignore[union-attr]
    assert "".join(pieces) == cut.choices[0].text, "a stream holds back what may become a stop"


def test_without_a_seed_texts_differ_and_a_prompt_may_be_token_ids(client: openai.OpenAI) -> None:
    first, second = (complete(client, seed=openai.omit, max_tokens=16) for _ in range(2))
    seeds = [each.usage.model_extra["outrider"]["seed"] for each in (first, second)]  # type: ignore[union-attr]
    assert seeds[0] != seeds[1]
    again = complete(client, seed=seeds[0], max_tokens=16)
    assert again.choices[0].text == first.choices[0].text
    assert complete(client, prompt=[40, 50, 60], max_tokens=2).usage.prompt_tokens == 3  # type: ignore[union-attr]


def test_a_chat_streamed_and_whole_gives_one_text(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "seed": 3, "max_completion_tokens": 24, "temperature": 0.5}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content and text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_next_turn_of_a_conversation_finds_the_drafts_memory(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me of ships, and of what they carry across the sea."}]
    options = {"model": MODEL, "seed": 5, "max_tokens": 16}
    first = client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content or ""},
        {"role": "user", "content": "And of the wind?"},
    ]
    second = client.chat.completions.create(messages=messages, **options)  # type: ignore[arg-type]
    reused = second.usage.model_extra["outrider"]["num_reused_draft_tokens"]  # type: ignore[union-attr]
    assert reused >= first.usage.prompt_tokens  # type: ignore[union-attr]


def test_logprobs_are_the_targets_in_both_shapes(client: openai.OpenAI) -> None:
    found = complete(client, temperature=0, logprobs=3, max_tokens=8).choices[0].logprobs
    assert found is not None and len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 8
    assert "".join(found.tokens) == complete(client, temperature=0, max_tokens=8).choices[0].text
    for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3 and math.isclose(logprob, max(top.values())), "greedy takes the most probable"
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )  # type: ignore[call-overload]
    for entry in chat.choices[0].logprobs.content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 2
        assert bytes(entry.bytes).decode() == entry.token


def test_a_bias_and_the_extras_reach_the_decoding(client: openai.OpenAI) -> None:
    forced = complete(client, logit_bias={"65": 100}, max_tokens=6, temperature=0)
    assert forced.choices[0].text == 6 * forced.choices[0].text[:1]
    extras = {"mode": "cloud-only", "top_k": 5}
    alone = complete(client, extra_body={"outrider": extras})
    own = alone.usage.model_extra["outrider"]  # type: ignore[union-attr]
    assert own["mode"] == "cloud-only" and own["num_rounds"] == 0
    drafted = complete(client, extra_body={"outrider": {"top_k": 5, "num_speculative_tokens": 2}})
    assert drafted.choices[0].text == alone.choices[0].text, "the mode does not change the text"
    for changes in ({"mode": "auto"}, {"pipeline": "on"}, {"depth_policy": "optimal"}):
        other = complete(client, extra_body={"outrider": {"top_k": 5, **changes}})
        assert other.choices[0].text == alone.choices[0].text, changes
    unverified = complete(client, extra_body={"outrider": {"mode": "edge-only"}})
    assert not unverified.usage.model_extra["outrider"]["exact"]  # type: ignore[union-attr]
    assert not unverified.usage.model_extra["outrider"]["reproducible"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"n": 200}, "n", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"extra_body": {"grammar": "x"}}, "grammar", "unsupported_parameter"),
        ({"extra_body": {"outrider": {"mode": "warp"}}}, "outrider.mode", "invalid_value"),
        ({"prompt": "word " * 5000}, "prompt", "context_length_exceeded"),
    ],
)
def test_what_is_wrong_or_unsupported_is_a_bad_request_that_names_it(
    client: openai.OpenAI, options: dict[str, object], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **options)
    assert caught.value.param == param and caught.value.code == code
    assert caught.value.type == "invalid_request_error" and param.split(".")[-1] in caught.value.message


def test_another_model_and_another_url_are_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"there are .*/v1/chat/completions"):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.NotFoundError):
        client.post("/completions/", body={"prompt": "x"}, cast_to=object)


def test_curl_reads_well_formed_events(daemon: DaemonProcess) -> None:
    extras = {"tokens": True, "ignore_eos": True}
    body = {"prompt": PROMPT, "max_tokens": 12, "stream": True, "outrider": extras}
    command = ["curl", "-sN", "-i", f"{daemon.url}/v1/completions", "-d", json.dumps(body)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    head, _, content = answer.replace("\r\n", "\n").partition("\n\n")
    assert "200 OK" in head and "content-type: text/event-stream" in head
    events = content.split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    told_by = [json.loads(event[6:]).get("outrider", {}) for event in events]
    told = [token for each in told_by for token in each.get("tokens", [])]
    assert [token["index"] for token in told] == list(range(12))
    assert {token["origin"] for token in told} <= {"target", "accepted", "correction", "bonus"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "\\ud800": 1}',
        b'{"prompt": "\xed\xa0\x80"}',  # the same half, not as an escape
        '{"prompt": "\\ud800"}'.encode("utf-16"),
        b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
        b'{"prompt": "x", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": 1e999}',
        b'{"prompt": [[]]}',
        b'{"prompt": [true]}',
        b'{"prompt": "x", "stop": {"a": 1}}',
        b'{"prompt": "x", "logit_bias": {"1": "x"}}',
        b'{"prompt": "x", "outrider": {"bad_word": [""]}}',
        b'{"prompt": "x", "outrider": {"timeout_ms": "soon"}}',
        b'{"prompt": "x", "outrider": {"stop_token_id": [99999999]}}',
        b'{"prompt": "x", "outrider": {"method": "sparse", "threshold_pass": 0.1}}',
    ],
)
def test_no_malformed_body_is_more_than_a_bad_request(daemon: DaemonProcess, body: bytes) -> None:
    request = urllib.request.Request(f"{daemon.url}/v1/completions", data=body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code == 400 and set(json.load(answer)["error"]) == {"message", "type", "param", "code"}
