"""Who may call a daemon, what it says of itself, and what SIGHUP changes."""

from __future__ import annotations

import base64
import re
import socket
import subprocess
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.daemon.daemons import DaemonProcess, running_daemon, wait_until

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.daemon.http.routes import make_routes
from outrider.experiments.shared.processes import run_edge

KEY, OTHER = "sk-first", "sk-second"
PUBLIC = {"/health", "/ready"}
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "daemon.md"


@pytest.fixture(scope="module")
def guarded(verifier: VerifierServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "keys").write_text(f"# two of them\n{KEY}\n\n{OTHER}\n")
    config = directory / "edge.yaml"
    config.write_text(
        f"serve:\n  api_key_file: {directory / 'keys'}\n  cors_origin: [https://notes.example]\n"
    )
    with running_daemon(f"127.0.0.1:{verifier.port}", config=config) as process:
        yield process


def status(daemon: DaemonProcess, path: str, **headers: str) -> int:
    try:
        daemon.get(path, **headers)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{key}".encode()).decode()}


def test_every_route_but_health_wants_a_key(guarded: DaemonProcess) -> None:
    routes = {route.path for route in make_routes(None, _Anything())}  # type: ignore[arg-type]
    assert {"/", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"} <= routes
    for path in routes | {"/no/such/route"}:
        expected = 200 if path in PUBLIC else 401
        assert status(guarded, path) == expected, path
        assert status(guarded, path, **bearer(KEY + "x")) == expected, path
    assert [status(guarded, "/v1/models", **bearer(key)) for key in (KEY, OTHER)] == [200, 200]
    assert status(guarded, "/", **basic(OTHER)) == 200 and status(guarded, "/", **basic("")) == 401


class _Anything:
    def __getattr__(self, name: str) -> object:
        return lambda request: None


def test_ps_shows_a_key_of_the_daemons_own_file_and_a_variable_may_hold_one(
    guarded: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps = ["ps", "--listen", guarded.address]
    assert run_edge([*ps, "--config", str(guarded.config)]).returncode == 0
    refused = run_edge(ps)
    assert refused.returncode == 2 and "a valid API key is needed" in refused.stderr
    monkeypatch.setenv("OUTRIDER_EDGE_SERVE_API_KEY", OTHER)
    assert run_edge(ps).returncode == 0


def test_a_wrong_key_is_an_authentication_error(guarded: DaemonProcess) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="outrider", prompt="x")
        assert caught.value.code == "invalid_api_key"


def test_pages_from_elsewhere_may_call_only_where_the_operator_named_them(guarded: DaemonProcess) -> None:
    allowed, foreign = "https://notes.example", "https://evil.example"
    assert status(guarded, "/v1/models", Origin=foreign, **bearer(KEY)) == 403
    assert status(guarded, "/v1/models", Origin=allowed, **bearer(KEY)) == 200
    assert status(guarded, "/v1/models", Origin=guarded.url, **bearer(KEY)) == 200, "its own page"
    command = ["curl", "-s", "-i", "-X", "OPTIONS", f"{guarded.url}/v1/completions"]
    command += ["-H", "Access-Control-Request-Method: POST"]
    command += ["-H", "Access-Control-Request-Private-Network: true", "-H"]
    answers = [
        subprocess.run([*command, f"Origin: {origin}"], capture_output=True, text=True, check=True).stdout
        for origin in (allowed, foreign)
    ]
    assert f"access-control-allow-origin: {allowed}" in answers[0].lower()
    assert "http/1.1 200" in answers[0].lower(), "as an https page asks before it calls this machine"
    assert "access-control-allow-private-network: true" in answers[0].lower()
    assert "access-control-allow-origin" not in answers[1].lower()


def test_without_a_key_a_loopback_daemon_answers_to_its_own_names_alone(daemon: DaemonProcess) -> None:
    assert status(daemon, "/v1/models", Host="localhost:7079") == 200
    assert status(daemon, "/v1/models", Host="rebound.example") == 403
    assert status(daemon, "/v1/models", Origin="https://evil.example") == 403


def test_headers_that_are_nonsense_are_refused_like_any_other(
    daemon: DaemonProcess, guarded: DaemonProcess
) -> None:
    for value in ("Basic \xe9\xe9", "Basic AAA", "Basic \xff=", "Bearer \xff", "\xff"):
        assert status(guarded, "/v1/models", Authorization=value) == 401, value
    for host in ("[::1", "[evil]", "127.0.0.1@evil.example", "a b", "127.0.0.1.evil.example", "127.1"):
        assert status(daemon, "/v1/models", Host=host) == 403, host
    for origin in ("null", "http://[", "http://", "//", "127.0.0.1", "file://", daemon.address, "\xff"):
        assert status(daemon, "/v1/models", Origin=origin) == 403, origin


def test_a_client_that_never_sends_its_request_whole_is_cut_off_and_others_are_served(
    verifier: VerifierServer,
) -> None:
    with running_daemon(f"127.0.0.1:{verifier.port}", "--read-timeout-s", "0.4") as daemon:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {daemon.address}\r\nContent-Length: 100\r\n"
        silent, slow, halting = (connect(daemon) for _ in range(3))
        slow.sendall(head.encode())
        halting.sendall(f"{head}\r\n{{".encode())
        for client in (silent, slow):
            with client, pytest.raises(ConnectionResetError):
                client.recv(1)
        with halting:
            answer = halting.recv(65536).decode()
        assert answer.startswith("HTTP/1.1 408 ") and "not whole after 0.4 s" in answer
        assert daemon.get("/health") == {"status": "ok"}


def connect(daemon: DaemonProcess) -> socket.socket:
    host, _, port = daemon.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_more_than_one_length_and_a_chunked_body_beside_it_are_no_request(daemon: DaemonProcess) -> None:
    """What a proxy before the daemon might read in another way."""
    for doubtful in (
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: 2, 3",
        "Content-Length: +2",
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Content-Length : 2",
    ):
        with connect(daemon) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {daemon.address}\r\n{doubtful}\r\n\r\n{{}}"
            client.sendall(head.encode())
            answer = client.makefile("rb").read()  # to the end: nothing else is read from this client
        assert answer.startswith(b"HTTP/1.1 400 "), (doubtful, answer)


def test_a_head_without_end_is_not_kept(daemon: DaemonProcess) -> None:
    with connect(daemon) as client, pytest.raises(OSError):
        client.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(100_000):
            client.sendall(b"X-More: " + b"a" * 10_000 + b"\r\n")


def test_beyond_loopback_it_wants_a_key_or_insecure() -> None:
    done = run_edge(["serve", "--listen", "0.0.0.0:0"])
    assert done.returncode == 2 and "--api-key-file" in done.stderr and "--insecure" in done.stderr


def test_numbers_and_logs_never_carry_a_text(
    verifier: VerifierServer, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--draft-cache-mb", "0", "--log-json", "--log-level", "debug")
    with running_daemon(f"127.0.0.1:{verifier.port}", *flags) as daemon:
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            made = client.completions.create(
                model="outrider", prompt="xylophone quartet", user="ann", max_tokens=8, seed=1, stream=True
            )
            first = next(iter(made))
            sessions = daemon.get("/v1/sessions")
            list(made)
        # Counted and logged once the stream has ended.
        assert wait_until(lambda: b'"/v1/completions",status="200"} 1.0' in daemon.get("/metrics"))
        metrics, logs = daemon.get("/metrics").decode(), capfd.readouterr().err
        assert f'"request": "{first.id}"' in logs and '"num_tokens": 8' in logs
        assert "xylophone" not in f"{metrics}{sessions}{logs}" and "ann" not in metrics
        counts = dict(re.findall(r"^(outrider_edge_\S+) (\S+)$", metrics, re.MULTILINE))
        assert counts['outrider_edge_requests_total{route="/v1/completions",status="200"}'] == "1.0"
        assert sum(float(counts[name]) for name in counts if "edge_tokens_total" in name) == 8
        assert counts["outrider_edge_ttft_seconds_count"] == "1.0"
        assert counts["outrider_edge_draft_cache_texts"] == "0.0"
        ps = run_edge(["ps", "--listen", daemon.address])
        assert ps.returncode == 0 and ps.stdout.startswith("ID") and "0 of 4 running" in ps.stdout


def test_a_hang_up_reloads_what_can_be_reloaded(verifier: VerifierServer, tmp_path: Path) -> None:
    config = tmp_path / "edge.yaml"
    config.write_text("serve: {model_name: first}\n")
    with running_daemon(f"127.0.0.1:{verifier.port}", config=config) as daemon:

        def name() -> str:
            return str(daemon.get("/v1/models")["data"][0]["id"])

        assert name() == "first"
        config.write_text("serve: {model_name: [broken\n")
        daemon.hang_up()
        assert name() == "first"
        serve = "{model_name: second, stop_grace_s: 0.2, draft_cache_mb: 1}"
        config.write_text(f"serve: {serve}\nmode: cloud-only\n")
        daemon.hang_up()
        assert wait_until(lambda: name() == "second")
        assert daemon.get("/v1/models")["data"][0]["outrider"]["mode"] == "cloud-only"
        _stop_and_be_told(daemon)
    assert wait_until(lambda: verifier.engine.num_sessions == 0)


def _stop_and_be_told(daemon: DaemonProcess) -> None:
    """What runs longer than the grace ends with an error, not as if it were whole."""
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
        extras = {"outrider": {"ignore_eos": True}}
        stream = client.completions.create(
            model="second", prompt="x", max_tokens=4000, stream=True, extra_body=extras
        )
        next(iter(stream))
        daemon.server.process.terminate()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
    assert daemon.server.process.wait(60) == 0


def test_without_a_verifier_it_is_not_ready_and_says_so() -> None:
    with running_daemon("127.0.0.1:1", "--recover-timeout-s", "0.3") as daemon:
        assert daemon.get("/health") == {"status": "ok"}
        assert status(daemon, "/ready") == 503
        with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="outrider", prompt="x", stream=True)
            assert caught.value.status_code == 503 and caught.value.code == "verifier_unreachable"
            extras = {"outrider": {"mode": "edge-only", "ignore_eos": True}}
            alone = client.completions.create(model="outrider", prompt="x", max_tokens=4, extra_body=extras)
            assert alone.usage.model_extra["outrider"]["num_unverified_tokens"] == 4


def test_the_embedded_pair_chats_without_a_flag(verifier: VerifierServer) -> None:
    with (
        running_daemon(f"127.0.0.1:{verifier.port}") as daemon,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client,
    ):
        said = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 12, "seed": 3}
        answer = client.chat.completions.create(model="outrider", **said)
        prompt = "# user\ndef add(a, b):\n\n# assistant\n"
        text = client.completions.create(model="outrider", prompt=prompt, max_tokens=12, seed=3)
    assert answer.choices[0].message.content == text.choices[0].text != ""


def test_a_model_without_a_chat_template_refuses_chats_by_name(draft_without_template: Path) -> None:
    flags = ("--draft", str(draft_without_template), "--recover-timeout-s", "0.3")
    with (
        running_daemon("127.0.0.1:1", *flags) as daemon,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        client.chat.completions.create(model="outrider", messages=[{"role": "user", "content": "x"}])
    assert refused.value.code == "no_chat_template" and "--chat-template" in refused.value.message


def test_every_metric_is_in_the_documentation_and_no_other(daemon: DaemonProcess) -> None:
    scraped = daemon.get("/metrics").decode()
    exposed = set(re.findall(r"^# TYPE outrider_edge_(\w+)", scraped, re.MULTILINE))
    section = DOCUMENT.read_text().partition("### Metrics")[2].partition("\n## ")[0]
    first_columns = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert exposed == {name for column in first_columns for name in re.findall(r"`(\w+)`", column)}


def test_the_default_port_is_documented() -> None:
    assert DaemonConfig().listen == "127.0.0.1:7079" and "127.0.0.1:7079" in DOCUMENT.read_text()
