"""A verifier that is gone in the middle of a text: what the daemon's clients, its page and its log are told."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.daemon.browser import Browser, running_browser
from support.daemon.daemons import DaemonProcess, running_daemon, wait_until
from support.edge.tcp_proxy import TcpProxy
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.processes.server import serving

from outrider.edge_client.commands.parser import make_parser
from outrider.edge_client.core.options import OnTimeout
from outrider.edge_client.daemon.command import load_daemon_config
from tests.edge_client.daemon.test_page import needs_chromium

PROMPT = "def read_lines(path):\n"
ENDLESS = {"prompt": PROMPT, "max_tokens": 380, "outrider": {"ignore_eos": True}}
ALONE = {"ignore_eos": True, "on_timeout": "edge_only"}


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "daemon.log"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_draft(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def _proxy(draft: Path) -> Iterator[TcpProxy]:
    with serving(make_backend(draft)) as verifier, TcpProxy(verifier.port) as made:
        yield made


@pytest.fixture
def proxy(_proxy: TcpProxy) -> Iterator[TcpProxy]:
    """A link that a test may break; it is whole again for the next one."""
    port = _proxy.target_port
    yield _proxy
    _proxy.is_swallowing, _proxy.target_port = False, port
    _proxy.cut()


def kill(proxy: TcpProxy) -> None:
    """Makes the verifier look killed: its connections end, and no new one comes about."""
    proxy.target_port = 1
    proxy.cut()


@pytest.fixture(scope="module")
def behind(_proxy: TcpProxy, draft: Path, log_file: Path) -> Iterator[DaemonProcess]:
    # The draft is slowed, so that no text is over before its link is gone.
    flags = (
        "--draft",
        str(draft),
        "--min-draft-ms",
        "10",
        "--recover-timeout-s",
        "2",
        "--log-json",
        "--log-level",
        "info",
    )
    with log_file.open("w") as log, running_daemon(f"127.0.0.1:{_proxy.port}", *flags, stderr=log) as process:
        yield process


@pytest.fixture(scope="module")
def its_client(behind: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{behind.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def logged(log_file: Path, request_id: str) -> dict[str, object]:
    """The line about a request, once there is one."""
    found: list[dict[str, object]] = []

    def is_there() -> bool:
        lines = [json.loads(line) for line in log_file.read_text().splitlines() if line.startswith("{")]
        found[:] = [line for line in lines if line.get("request") == request_id]
        return bool(found)

    assert wait_until(is_there), log_file.read_text()
    return found[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], "wait"), (["--on-timeout", "first_token"], "first_token"), (["--on-timeout", "fail"], "fail")],
)
def test_a_daemon_waits_unless_its_operator_says_otherwise(flags: list[str], expected: str) -> None:
    arguments = ["serve", *flags]
    config = load_daemon_config(make_parser(arguments).parse_args(arguments)).value
    assert config.outage.on_timeout is OnTimeout(expected)


def test_a_stream_that_loses_its_verifier_ends_with_an_error_and_nothing_unverified(
    behind: DaemonProcess, proxy: TcpProxy, log_file: Path
) -> None:
    extras = {"ignore_eos": True, "tokens": True}
    body = json.dumps(ENDLESS | {"stream": True, "outrider": extras}).encode()
    request = urllib.request.Request(f"{behind.url}/v1/completions", data=body)
    with urllib.request.urlopen(request, timeout=60) as response:
        first = response.readline()
        proxy.is_swallowing = True
        events = [line[6:] for line in (first, *response) if line.startswith(b"data: ")]
    *chunks, last = map(json.loads, events)  # [DONE] is no JSON, and would say that the text is complete
    assert set(last) == {"error"} and set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["type"] == "server_error" and last["error"]["code"] == "verifier_unreachable"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk["outrider"]["tokens"]]
    assert tokens and all(token["verified"] for token in tokens)
    line = logged(log_file, chunks[0]["id"])
    assert line["status"] == 503 and line["code"] == "verifier_unreachable" and line["reason"]
    assert line["num_tokens"] == len(tokens)


def test_a_scrape_asks_the_verifier_itself(behind: DaemonProcess, proxy: TcpProxy) -> None:
    def told() -> list[str]:
        text = behind.get("/metrics").decode()
        return re.findall(r"^outrider_edge_verifier_reachable (\S+)$", text, re.MULTILINE)

    assert wait_until(lambda: told() == ["1.0"])
    kill(proxy)
    assert wait_until(lambda: told() == ["0.0"]), "nobody asked for /ready"


def test_a_daemon_that_needs_no_verifier_tells_of_none(draft: Path) -> None:
    with running_daemon("127.0.0.1:1", "--draft", str(draft), "--mode", "edge-only") as daemon:
        assert daemon.get("/v1/models")["data"][0]["outrider"]["verifier_reachable"] is False
        assert b"verifier_reachable" not in daemon.get("/metrics")


def test_the_openai_client_raises_for_a_stream_and_for_a_whole_text(
    its_client: openai.OpenAI, proxy: TcpProxy
) -> None:
    ask = its_client.completions.create
    extras = {"extra_body": {"outrider": {"ignore_eos": True}}}
    stream = ask(model="outrider", prompt=PROMPT, max_tokens=380, stream=True, **extras)
    next(iter(stream))
    kill(proxy)
    with pytest.raises(openai.APIError) as broken:
        list(stream)
    assert broken.value.code == "verifier_unreachable"
    with pytest.raises(openai.InternalServerError) as refused:
        ask(model="outrider", prompt=PROMPT, max_tokens=8, **extras)
    assert refused.value.status_code == 503 and refused.value.code == "verifier_unreachable"


def test_a_policy_that_keeps_unverified_tokens_warns_of_them(
    its_client: openai.OpenAI, proxy: TcpProxy, log_file: Path
) -> None:
    ask = its_client.completions.with_raw_response.create
    common = {"model": "outrider", "prompt": PROMPT}
    assert "x-outrider-warning" not in ask(max_tokens=8, **common).headers
    common["extra_body"] = {"outrider": ALONE}
    kill(proxy)
    answer = ask(max_tokens=30, **common)
    made = answer.parse()
    number = made.usage.model_extra["outrider"]["num_unverified_tokens"]
    note = f"{number} of 30 tokens are the draft's own, unverified"
    assert number > 0 and made.choices[0].finish_reason == "length"
    assert answer.headers["x-outrider-warning"].startswith(note)
    assert str(logged(log_file, made.id)["warning"]).startswith(note)
    *chunks, end = its_client.completions.create(max_tokens=30, stream=True, **common)
    assert end.choices[0].finish_reason == "length" and end.model_extra["outrider_warning"]
    assert not any("outrider_warning" in chunk.model_extra for chunk in chunks)


def test_the_log_says_how_many_tokens_a_client_that_left_had_got_and_why_others_were_refused(
    behind: DaemonProcess, its_client: openai.OpenAI, log_file: Path
) -> None:
    extras = {"ignore_eos": True, "tokens": True}
    stream = its_client.completions.create(
        model="outrider", prompt=PROMPT, max_tokens=380, stream=True, extra_body={"outrider": extras}
    )
    chunk = next(iter(stream))
    stream.close()
    line = logged(log_file, chunk.id)
    assert line["status"] == 499 and line["reason"] == "the client left"
    assert 380 > int(str(line["num_tokens"])) >= len(chunk.model_extra["outrider"]["tokens"]) > 0
    with pytest.raises(openai.BadRequestError) as caught:
        its_client.completions.create(
            model="outrider", prompt="x", extra_body={"outrider": {"a secret text": 1}}
        )
    line = logged(log_file, caught.value.response.headers["x-request-id"])
    assert (line["code"], line["num_tokens"]) == ("unknown_parameter", 0) and "reason" not in line
    subprocess.run(["curl", "-s", "-H", "Host: evil.example", f"{behind.url}/v1/models"], check=True)
    assert wait_until(lambda: "host_not_allowed" in log_file.read_text())


def test_models_says_that_the_verifier_is_gone_while_it_is(behind: DaemonProcess, proxy: TcpProxy) -> None:
    def about() -> dict[str, object]:
        found: dict[str, object] = behind.get("/v1/models")["data"][0]["outrider"]
        return found

    assert wait_until(lambda: about()["verifier_reachable"] is True) and about()["on_timeout"] == "wait"
    port = proxy.target_port
    kill(proxy)
    assert wait_until(lambda: about()["verifier_reachable"] is False)
    proxy.target_port = port
    assert wait_until(lambda: about()["verifier_reachable"] is True)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@needs_chromium
def test_the_page_shows_that_the_link_is_gone_while_it_is_and_after_a_reload(
    browser: Browser, behind: DaemonProcess, proxy: TcpProxy
) -> None:
    def text(name: str) -> str:
        return str(browser.run(f"document.getElementById({name!r}).textContent"))

    is_shown, is_back = (f"document.querySelector('#gone{is_}')" for is_ in (":not([hidden])", "[hidden]"))
    is_new = "document.readyState === 'complete' && !document.getElementById('about').textContent.startsWith('fake')"
    browser.open(behind.url + "/", 1280, 800)
    browser.wait_for(f"document.querySelectorAll('#mode option').length === 5 && {is_back}")
    browser.run("document.getElementById('max').value = 380; document.getElementById('go').click()")
    browser.wait_for("document.querySelectorAll('#text .t').length > 3")
    browser.run(
        "notes = []; write_note = note; note = (turn, ...rest) => { notes.push(rest[0]); write_note(turn, ...rest); }"
    )
    proxy.is_swallowing = True
    browser.wait_for(is_shown)
    assert re.search(r"verifier at \S+ does not answer: texts wait for it", text("gone"))
    browser.wait_for("document.getElementById('go').textContent === 'Write'")
    assert browser.run("document.getElementById('note').className") == "note bad"
    assert "no answer for 1 s: waiting for the verifier" in browser.run("notes")
    assert "no answer" in text("note") and text("go") == "Write"
    browser.open(behind.url + "/", 1280, 800)
    browser.wait_for(f"{is_new} && {is_shown}")
    assert text("about").startswith("verifier unreachable at "), "whatever was known of it before"
    proxy.is_swallowing = False
    browser.wait_for(is_back)
    assert text("about").startswith("fake (") and browser.trouble == []
