"""One verifier in this process, so that a test can look into it, and one client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.processes.pairs import EMBEDDED
from support.processes.server import serving

import outrider
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.server.server import VerifierServer


@pytest.fixture(scope="session")
def verifier() -> Iterator[VerifierServer]:
    with serving(load_target(EMBEDDED / "target")) as server:
        yield server


@pytest.fixture(scope="session")
def address(verifier: VerifierServer) -> str:
    return f"127.0.0.1:{verifier.port}"


@pytest.fixture(scope="session")
def client(address: str) -> Iterator[outrider.Client]:
    with outrider.connect(address, max_new_tokens=24) as made:
        yield made
