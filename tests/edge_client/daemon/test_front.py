"""Every answer of a daemon is counted, whoever gives it, under a label that clients cannot choose."""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.request
from pathlib import Path

from support.daemon.daemons import DaemonProcess, running_daemon, wait_until
from test_access_and_reload import connect, status

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.daemon.http.front import MAX_CONNECTIONS

KEY = "sk-front"
BEARER = {"Authorization": f"Bearer {KEY}"}


def counted(daemon: DaemonProcess, **headers: str) -> dict[tuple[str, int], float]:
    """The answers so far by route and status, without those to this question."""
    text = daemon.get("/metrics", **headers).decode()
    pattern = r'^outrider_edge_requests_total{route="(.*)",status="(\d+)"} (\S+)$'
    found = re.findall(pattern, text, re.MULTILINE)
    return {(route, int(code)): float(number) for route, code, number in found if route != "/metrics"}


def post(daemon: DaemonProcess, path: str, body: bytes, **headers: str) -> int:
    request = urllib.request.Request(daemon.url + path, body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_what_the_routes_do_not_answer_is_counted_too(verifier: VerifierServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    flags = ("--api-key-file", str(tmp_path / "keys"))
    with running_daemon(f"127.0.0.1:{verifier.port}", *flags) as daemon:
        assert status(daemon, "/v1/models") == 401
        assert [status(daemon, f"/no/such/{number}", **BEARER) for number in range(3)] == [404] * 3
        assert status(daemon, "/v1/completions", **BEARER) == 405
        assert status(daemon, "/v1/models/another", **BEARER) == 404
        assert post(daemon, "/v1/completions", b"{", **BEARER) == 400
        assert post(daemon, "/v1/completions", b'{"prompt": "def f", "max_tokens": 2}', **BEARER) == 200
        with connect(daemon) as client:
            client.sendall(b"nonsense\r\n\r\n")
            assert client.makefile("rb").read().startswith(b"HTTP/1.1 400 ")
        expected = {
            ("/v1/models", 401): 1,
            ("other", 404): 3,
            ("/v1/completions", 405): 1,
            ("/v1/models/{name}", 404): 1,
            ("/v1/completions", 400): 1,
            ("/v1/completions", 200): 1,
            ("other", 400): 1,
        }
        assert wait_until(lambda: counted(daemon, **BEARER) == expected), counted(daemon, **BEARER)


def test_beyond_the_bound_of_connections_answers_are_503_and_counted(verifier: VerifierServer) -> None:
    with running_daemon(f"127.0.0.1:{verifier.port}") as daemon:
        with contextlib.ExitStack() as open_ones:
            for _ in range(MAX_CONNECTIONS):
                open_ones.enter_context(connect(daemon))
            try:
                urllib.request.urlopen(f"{daemon.url}/v1/models", timeout=60)
            except urllib.error.HTTPError as error:
                with error:
                    assert error.code == 503 and b"too_many_connections" in error.read()
                    assert error.headers["connection"] == "close" and error.headers["retry-after"]
            else:
                raise AssertionError("it was answered")
        assert wait_until(lambda: status(daemon, "/health") == 200)
        assert counted(daemon)["/v1/models", 503] == 1
