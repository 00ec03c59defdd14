"""`outrider.connect`: the text of `edge-client run`, streams, threads, early leaving and closing."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.calls import eventually
from support.edge.tcp_proxy import TcpProxy
from support.processes.pairs import EMBEDDED
from support.processes.server import serving

import outrider
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.commands.cli import main
from outrider.edge_client.config.flags import with_keys
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.edge_client.library.client import Client
from outrider.edge_client.session.factory import create_edge
from outrider.edge_client.ui.conversation import Conversation

PROMPT = "class Reader:\n"


@contextlib.contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[list[object]]:
    """Runs `call` beside the block, and yields the list that its result, or its error, comes into."""
    found: list[object] = []

    def work() -> None:
        try:
            found.append(call())
        except outrider.OutriderError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    yield found
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_edge_client_run(
    client: Client, address: str, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--seed", "7", "--temperature", str(temperature), "--max-new-tokens", "24"]
    assert main(["run", PROMPT, "--verifier", address, *flags, "--on-timeout", "wait", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    result = client.generate(PROMPT, seed=7, temperature=temperature)
    assert (result.text, list(result.ids)) == (said["text"], said["token_ids"])
    assert (result.exact, result.seed, result.finish_reason) == (True, 7, said["finish_reason"])
    assert result.usage["completion_tokens"] == len(result.ids) == len(result.origins)
    assert set(result.origins) <= {"accepted", "correction", "bonus", "target"}


def test_token_ids_are_a_prompt_too(client: Client) -> None:
    ids = client._connection.tokenizer.encode(PROMPT)
    assert client.generate(ids, seed=3).ids == client.generate(PROMPT, seed=3).ids


def test_without_a_draft_the_target_writes_the_same_text(client: Client, address: str) -> None:
    with outrider.connect(address, draft="none", max_new_tokens=24) as cloud_only:
        result = cloud_only.generate(PROMPT, seed=5)
    assert result.text == client.generate(PROMPT, seed=5).text
    assert set(result.origins) == {"target"} and cloud_only.config.mode == "cloud-only"


def test_a_stream_has_every_token_and_then_the_end(client: Client) -> None:
    with client.stream(PROMPT, seed=2) as stream:
        events = list(stream)
        result = stream.result()
    tokens = [event for event in events if isinstance(event, outrider.TokenEvent)]
    assert [event.token_id for event in tokens] == list(result.ids)
    assert [event.origin for event in tokens] == list(result.origins)
    assert isinstance(events[-1], outrider.EndEvent) and len(events) == len(tokens) + 1
    assert "".join(event.text for event in tokens) + events[-1].text == result.text == "".join(result.pieces)
    assert result.text == client.generate(PROMPT, seed=2).text
    assert list(stream) == [], "a stream is read once"


def test_threads_share_a_draft_and_write_what_each_would_alone(
    client: Client, verifier: VerifierServer
) -> None:
    alone = {seed: client.generate(PROMPT, seed=seed).text for seed in (1, 2)}
    texts: list[tuple[int, str]] = []

    def work(seed: int) -> None:
        texts.append((seed, client.generate(PROMPT, seed=seed).text))

    threads = [threading.Thread(target=work, args=(1 + number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(texts) == sorted([*alone.items()] * 2)
    client._connection.check_integrity()
    assert eventually(lambda: verifier.engine.num_sessions == 0)


@pytest.mark.parametrize("way", ["with", "break", "drop"])
def test_leaving_a_stream_early_ends_it_at_the_verifier(
    client: Client, verifier: VerifierServer, way: str
) -> None:
    stream = client.stream(PROMPT, max_new_tokens=3000, ignore_eos=True)
    if way == "with":
        with stream:
            next(stream)
        assert stream.result().finish_reason == "cancelled"
        assert 0 < len(stream.result().ids) < 3000
    elif way == "break":
        for _ in stream:
            break
    del stream
    assert eventually(lambda: verifier.engine.num_sessions == 0 and not client._connection._running)
    assert client.generate(PROMPT, seed=1).exact, "the client still works"


def test_closing_waits_for_what_runs(address: str) -> None:
    client = outrider.connect(address, max_new_tokens=40, ignore_eos=True)
    stream = client.stream(PROMPT, seed=1)
    client.close()
    assert len(stream.result().ids) == 40 and stream.result().finish_reason == "length"
    client.close()
    with pytest.raises(outrider.ClosedError, match="this client is closed"):
        client.generate(PROMPT)


def test_closing_cancels_what_runs_where_it_is_asked_to(address: str, verifier: VerifierServer) -> None:
    client = outrider.connect(address, max_new_tokens=3000, ignore_eos=True)
    with in_thread(lambda: client.generate(PROMPT)) as found:
        assert eventually(lambda: verifier.engine.num_sessions == 1)
        client.close(cancel=True)
    (result,) = found
    assert isinstance(result, outrider.Result) and result.finish_reason == "cancelled"
    assert eventually(lambda: verifier.engine.num_sessions == 0)


def test_an_error_in_the_block_cancels_what_runs(address: str) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        outrider.connect(address, max_new_tokens=3000, ignore_eos=True) as client,
    ):
        stream = client.stream(PROMPT)
        _ = 1 / 0
    assert stream.result().finish_reason == "cancelled"


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temprature": 0.2}, "unknown setting temprature; did you mean temperature?"),
        ({"temperature": "hot"}, r"temperature \(given\): is 'hot'; expected a number"),
        ({"log_level": "debug"}, "logger"),
        ({"serve.listen": "127.0.0.1:1"}, "unknown setting"),
        ({"draft": "none", "mode": "speculative"}, "that mode drafts here"),
        ({"draft": "/nowhere"}, "no draft at /nowhere: name one with draft DIR"),
        ({"pipeline": "on", "transport": "unary"}, "pipeline on needs transport stream"),
    ],
)
def test_a_wrong_setting_is_named(address: str, settings: dict[str, object], words: str) -> None:
    with pytest.raises(outrider.UsageError, match=words):
        outrider.connect(address, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        (PROMPT, {"max_tokens": 3}, "unknown setting max_tokens; did you mean max_new_tokens?"),
        (PROMPT, {"draft_threads": 3}, "draft_threads is no setting of a call: give it to outrider.connect"),
        (PROMPT, {"top_p": 3.0}, "top_p"),
        (PROMPT, {"mode": "cloud-only", "num_speculative_tokens": 3}, "has no rounds"),
        ("", {}, "the prompt is empty"),
        (["one", "two"], {}, "one call for each prompt"),
        ([1, 10**9], {}, "there is no token 1000000000"),
    ],
)
def test_a_wrong_call_is_named(client: Client, prompt: str, sampling: dict[str, object], words: str) -> None:
    with pytest.raises(outrider.UsageError, match=words):
        client.generate(prompt, **sampling)


@pytest.mark.parametrize(
    ("verifier", "error"), [("nonsense", outrider.UsageError), ("127.0.0.1:9", outrider.LinkError)]
)
def test_a_wrong_address_is_said_at_once(verifier: str, error: type[Exception]) -> None:
    with pytest.raises(error, match=verifier):
        outrider.connect(verifier)


def test_after_an_error_the_text_so_far_is_there() -> None:
    """With a verifier of its own, which keeps the session whose edge went away."""
    settings = {"on_timeout": "fail", "timeout_ms": 1000, "mode": "speculative", "pipeline": "off"}
    with (
        serving(load_target(EMBEDDED / "target")) as verifier,
        TcpProxy(verifier.port) as proxy,
        outrider.connect(f"127.0.0.1:{proxy.port}", **settings) as client,  # type: ignore[arg-type]
        client.stream(PROMPT, max_new_tokens=3000, ignore_eos=True) as stream,
    ):
        next(stream)
        proxy.is_swallowing = True
        with pytest.raises(outrider.LinkError):
            list(stream)
        result = stream.result()
    assert result.finish_reason == "error" and result.ids


def test_messages_about_flags_name_keywords_instead() -> None:
    assert with_keys("--recover-timeout-s 3: --tls") == "recover_timeout_s 3: tls"


def test_settings_come_from_the_environment_as_for_the_commands(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_EDGE_TOP_K", "5")
    monkeypatch.setenv("OUTRIDER_EDGE_TOP_P", "0.5")
    with outrider.connect(address, draft="none", top_p=0.25, stop="a,b") as client:
        assert (client.config.sampling.top_k, client.config.sampling.top_p) == (5, 0.25)
        assert client.config.stop.strings == ("a,b",) and client.config.outage.on_timeout == "wait"


def test_lists_are_given_as_python_has_them(client: Client) -> None:
    first = client.generate(PROMPT, temperature=0, seed=1).ids[0]
    assert client.generate(PROMPT, temperature=0, seed=1, logit_bias={first: -50}).ids[0] != first
    ended = client.generate(PROMPT, temperature=0, seed=1, stop_token_id=first)
    assert ended.ids == (first,) and ended.finish_reason == "stop"


def test_a_draft_directory_is_a_path(address: str) -> None:
    with outrider.connect(address, draft=EMBEDDED / "draft") as client:
        assert client.model is not None and client.model.methods


def test_a_conversation_changes_its_mode_whatever_it_began_with(address: str) -> None:
    began = run_config(verifier=address, gate="stop", gate_nll=1.0, reverify=True, pipeline="on", tree=4)
    edge = create_edge(began)
    talk = Conversation(edge, None)
    for mode in REQUESTABLE_MODES:
        talk.set_mode(mode)
        talk.begin("def main():")
    talk.set_mode("speculative")
    assert replace(talk.config, mode=began.mode) == began
    edge.close()


@pytest.mark.parametrize("strategy", ["suffix", "model+suffix", "staged"])
def test_texts_are_remembered_by_clients_and_conversations_as_by_run(
    address: str, strategy: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"draft_strategy": strategy, "max_new_tokens": 4}
    with outrider.connect(address, suffix_store=tmp_path / "client", **asked) as made:
        made.generate("def main():", seed=1)
    edge = create_edge(run_config(verifier=address, suffix_store=tmp_path / "chat", **asked))
    for _ in Conversation(edge, None).begin("def main():").generate():
        pass
    edge.close()
    assert [len([*(tmp_path / name).iterdir()]) for name in ("client", "chat")] == [1, 1]
