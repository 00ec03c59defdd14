"""One verifier in this process, so that a test can look into it, and one daemon beside it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.daemon.daemons import CHATML, DaemonProcess, running_daemon
from support.processes.pairs import EMBEDDED
from support.processes.server import serving

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.loading import create_grammars
from outrider.cloud_verifier.server.server import VerifierServer


@pytest.fixture(scope="session")
def verifier() -> Iterator[VerifierServer]:
    backend = load_target(EMBEDDED / "target")
    with serving(backend, grammars=create_grammars(ServeConfig(), backend)) as server:
        yield server


@pytest.fixture(scope="session")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(CHATML)
    return path


@pytest.fixture(scope="session")
def draft_without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "draft"
    shutil.copytree(EMBEDDED / "draft", directory, ignore=shutil.ignore_patterns("chat_template.jinja"))
    return directory


@pytest.fixture(scope="session")
def daemon(verifier: VerifierServer, template_file: Path) -> Iterator[DaemonProcess]:
    flags = ("--chat-template", str(template_file), "--max-requests", "6", "--write-timeout-s", "1")
    # Timeouts of a busy machine must not change a text here.
    with running_daemon(f"127.0.0.1:{verifier.port}", *flags, "--on-timeout", "wait") as process:
        yield process


@pytest.fixture(scope="session")
def client(daemon: DaemonProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
