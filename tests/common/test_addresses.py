"""Addresses that cannot be listened on are named at once, with why and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from outrider.cloud_verifier.server.cli import main
from outrider.common.config.addresses import check_unused
from outrider.common.errors import UsageError


@pytest.fixture
def used() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_that_another_process_has_is_refused_and_a_free_one_stays_free(used: str) -> None:
    with pytest.raises(UsageError, match=f"--listen {used}: cannot bind: another process listens there"):
        check_unused(used, "--listen")
    check_unused("127.0.0.1:0", "--listen")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    check_unused(f"127.0.0.1:{port}", "--listen")
    socket.create_server(("127.0.0.1", port)).close()


def test_an_address_of_another_machine_is_told_from_a_port_in_use() -> None:
    with pytest.raises(UsageError, match=r"--listen 192\.0\.2\.1:7077: .*this machine has no such address"):
        check_unused("192.0.2.1:7077", "--listen")


def test_a_verifier_says_so_before_it_loads_its_weights(
    used: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "outrider.cloud_verifier.backends.loading.load_target", lambda *_, **__: pytest.fail("loaded")
    )
    for flag, other in (("--listen", "--admin-listen"), ("--admin-listen", "--listen")):
        assert main(["serve", flag, used, other, "127.0.0.1:0"]) == 2
        assert f"cloud-verifier: {flag} {used}: cannot bind" in capsys.readouterr().err
