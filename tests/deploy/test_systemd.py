"""The units: valid, hardened, installed and removed; and how a service tells systemd that it is well."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.calls import eventually

from outrider.cloud_verifier.server.supervision import Supervision
from outrider.common.process.sd_notify import Notifier
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
VERIFIER, EDGE = "outrider-verifier.service", "outrider-edge.service"
DROP_INS = {
    VERIFIER: [(), ("tls",), ("gpu",), ("tls", "gpu")],
    EDGE: [(), ("sandbox",)],
}
CASES = [(unit, names) for unit, all_names in DROP_INS.items() for names in all_names]
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on this machine"
)


def unit_path(directory: Path, unit: str, names: tuple[str, ...]) -> Path:
    """The unit with these drop-ins, its command one that exists here."""
    text = (UNITS / unit).read_text()
    directory.joinpath(unit).write_text(re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", text))
    drop_ins = directory / f"{unit}.d"
    drop_ins.mkdir()
    for name in names:
        shutil.copy(UNITS / f"{unit}.d" / f"{name}.conf.example", drop_ins / f"{name}.conf")
    return directory / unit


def analyze(path: Path, unit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{path.parent}:", "XDG_RUNTIME_DIR": str(path.parent)}
    scope = ["--user"] if unit == EDGE else ["--system"]
    command = ["systemd-analyze", *scope, "--no-pager", *arguments, str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize(("unit", "names"), CASES)
def test_systemd_has_nothing_to_say_about_the_units(
    tmp_path: Path, unit: str, names: tuple[str, ...]
) -> None:
    done = analyze(unit_path(tmp_path, unit, names), unit, "verify", "--man=no")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize(("unit", "names"), [case for case in CASES if case != (EDGE, ())])
def test_the_units_expose_little(tmp_path: Path, unit: str, names: tuple[str, ...]) -> None:
    done = analyze(unit_path(tmp_path, unit, names), unit, "security", "--offline=true")
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert score is not None, done.stdout + done.stderr
    assert float(score[1]) <= 2.0, done.stdout


@pytest.mark.parametrize("which", ["verifier", "edge"])
def test_what_install_writes_uninstall_takes_away(tmp_path: Path, which: str) -> None:
    environment = os.environ | {"DESTDIR": str(tmp_path), "HOME": "/home/somebody", "WHAT": "-"}
    environment.pop("XDG_CONFIG_HOME", None)

    def run(script: str, *arguments: str) -> set[str]:
        command = [str(UNITS / script), which, *arguments]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        return {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}

    installed = run("install.sh")
    files = {"verifier": "etc/outrider/verifier.yaml", "edge": "home/somebody/.config/outrider/edge.yaml"}
    config = files[which]
    assert config in installed and any(name.endswith(f"outrider-{which}.service") for name in installed)
    (tmp_path / config).write_text("changed: by the operator\n")
    assert run("install.sh") == installed and "changed" in (tmp_path / config).read_text()
    assert run("uninstall.sh") == {config}
    assert run("uninstall.sh", "--purge") == set()


# ------------------------------------------------------------------------------------ notification


@dataclass
class Systemd:
    """The end of NOTIFY_SOCKET that hears."""

    path: str
    heard: socket.socket

    def next(self) -> list[str]:
        return self.heard.recv(4096).decode().splitlines()


@pytest.fixture(params=["file", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    is_file = request.param == "file"
    path = str(tmp_path / "notify") if is_file else f"@outrider-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(path if is_file else "\0" + path[1:])
        heard.settimeout(60)
        yield Systemd(path, heard)


def test_what_a_notifier_says(systemd: Systemd) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "3000000"})
    assert notifier.watchdog_s == 3.0
    notifier.ready("serving")
    assert systemd.next() == ["READY=1", "STATUS=serving"]
    notifier.alive()
    notifier.status("busy")
    notifier.stopping()
    assert [systemd.next() for _ in range(3)] == [["WATCHDOG=1"], ["STATUS=busy"], ["STOPPING=1"]]


def test_without_systemd_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    Notifier({}).ready()
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()
    assert Notifier({"WATCHDOG_USEC": "5"}).watchdog_s is None
    for env in ({"WATCHDOG_USEC": "x"}, {}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}):
        assert Notifier({"NOTIFY_SOCKET": "@x", **env}).watchdog_s is None


@dataclass
class FakeEngine:
    is_running: bool = True
    num_jobs: int = 0
    num_steps: int = 0


def test_an_engine_that_has_work_and_does_no_step_does_not_get_on() -> None:
    engine = FakeEngine()
    supervision = Supervision(engine, Notifier({}))
    assert supervision.makes_progress() and supervision.makes_progress(), "idle"
    engine.num_jobs = 1
    assert not supervision.makes_progress()
    engine.num_steps = 1
    assert supervision.makes_progress() and not supervision.makes_progress()
    engine.num_jobs, engine.is_running = 0, False
    assert not supervision.makes_progress()


def test_the_watchdog_hears_nothing_of_an_engine_that_hangs(systemd: Systemd) -> None:
    engine = FakeEngine()
    env = {"NOTIFY_SOCKET": systemd.path, "WATCHDOG_USEC": "20000"}

    async def run() -> None:
        supervision = Supervision(engine, Notifier(env))
        supervision.ready("serving")
        loop = asyncio.get_running_loop()
        for words in (["READY=1", "STATUS=serving"], ["WATCHDOG=1"], ["WATCHDOG=1"]):
            assert await loop.run_in_executor(None, systemd.next) == words
        engine.num_jobs = 1
        systemd.heard.settimeout(0.2)
        with pytest.raises(TimeoutError):
            while True:  # what was on its way; then silence
                assert await loop.run_in_executor(None, systemd.next) == ["WATCHDOG=1"]
        supervision.close()

    asyncio.run(run())


@pytest.mark.parametrize("systemd", ["file"], indirect=True)
def test_a_verifier_says_when_it_serves_that_it_lives_and_that_it_drains(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.path)
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with running_synthetic(SyntheticPair()) as verifier:
        port = verifier.address.rpartition(":")[2]
        ready, status = systemd.next()
        assert ready == "READY=1" and status.startswith("STATUS=serving ") and status.endswith(port)
        assert systemd.next() == systemd.next() == ["WATCHDOG=1"]
        verifier.process.terminate()
        assert eventually(lambda: systemd.next()[0] == "STOPPING=1")
