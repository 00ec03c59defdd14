"""Servers that experiments start: Ctrl-C is not for them, and they outlive nobody."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from outrider.common.config.addresses import check_unused, split_address
from outrider.experiments.shared.processes import kept_address, start_server

IP_LOCAL_PORT_RANGE = 51  # Python names it from 3.14 on
ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("serving", len(sys.argv) - 1, "on 127.0.0.1:1", flush=True)
signal.pause()
"""
OWNER = """
import sys, time
from outrider.experiments.shared.processes import start_server
print(start_server([sys.executable, "-m", "stand_in"]).process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stand_in.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")


def test_a_server_is_not_in_its_owners_process_group_and_stops_when_told() -> None:
    server = start_server([sys.executable, "-m", "stand_in", "one", "two"])
    assert server.address == "127.0.0.1:1"
    assert os.getpgid(server.process.pid) != os.getpgid(0)
    assert server.stop() == 7


def test_a_server_has_no_thread_but_its_own() -> None:
    server = start_server([sys.executable, "-m", "stand_in"])
    assert len(os.listdir(f"/proc/{server.process.pid}/task")) == 1, (
        "the C library gives every other one a heap"
    )
    server.stop()


def test_a_server_ends_with_an_owner_that_was_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    watched = os.pidfd_open(int(owner.stdout.readline()))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    # A process's descriptor is readable once it has ended.
    assert select.select([watched], [], [], 30)[0]
    os.close(watched)


def test_a_kept_address_refuses_connections_and_one_server_after_the_other_can_listen_there() -> None:
    with kept_address() as address:
        where = split_address(address, "--listen")
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(where)
            check_unused(address, "--listen")
            server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
            assert server.add_insecure_port(address) == where[1]
            server.start()
            socket.create_connection(where).close()
            server.stop(None).wait()


@pytest.mark.parametrize("reuses", [0, 1])
def test_nobody_who_asks_for_any_port_is_given_that_of_a_kept_address(reuses: int) -> None:
    def take_any_port_of(port: int) -> None:
        with socket.socket() as other:
            try:
                other.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
            except OSError:
                pytest.skip("this kernel has no IP_LOCAL_PORT_RANGE (Linux 6.3)")
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            other.bind(("127.0.0.1", 0))

    with kept_address() as address:
        port = split_address(address, "--listen")[1]
        with pytest.raises(OSError, match="in use"):
            take_any_port_of(port)
    take_any_port_of(port)
