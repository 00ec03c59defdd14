"""Three verifiers as real processes behind ring hash, under load: killed, drained, restarted one by one."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import PATIENCE_S, eventually
from support.models import make_tiny_target
from support.processes.decoding import decode
from support.processes.forked import start_server, start_verifier

from outrider.common.types import CancelRequest, Draining, SamplingParams
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.session import SessionResult, new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.shared.processes import VerifierProcess, kept_address
from outrider.experiments.synthetic.draft import SyntheticDraft
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import serve_command

NUM_TEXTS, NUM_NEW, NUM_CLIENTS = 6, 32, 4
GRACE_S = 30.0  # less than PATIENCE_S; texts under way end long before
_FLAGS = ("--drain-grace-s", str(GRACE_S), "--admin-listen", "127.0.0.1:0", "--log-level", "warning")


@dataclass
class Fleet:
    """Verifiers of one target, each keeps its address over restarts; and the draft of their edges."""

    start: Callable[[str], VerifierProcess]  # listening there
    draft: Any
    verifiers: list[VerifierProcess] = field(default_factory=list)

    @property
    def address(self) -> str:
        return ",".join(verifier.address for verifier in self.verifiers)

    def metric(self, index: int, name: str) -> int:
        url = f"{self.verifiers[index].admin_url}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            found = re.search(rf"^outrider_verifier_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, name
        return int(float(found[1]))

    def restore(self) -> None:
        """Starts again those that have ended, and those that hold sessions of earlier tests."""
        for index, verifier in enumerate(self.verifiers):
            if verifier.process.poll() is None and self.metric(index, "sessions"):
                verifier.kill()
            if verifier.process.poll() is not None:
                self.verifiers[index] = self.start(verifier.address)


@contextlib.contextmanager
def synthetic_fleet() -> Iterator[Fleet]:
    pair = SyntheticPair(target_s=0.002)

    def start(listen: str) -> VerifierProcess:
        return start_server(*serve_command(pair, *_FLAGS, listen=listen)[2:])

    yield Fleet(start, SyntheticDraft(pair))


@contextlib.contextmanager
def tiny_fleet(directory: Path) -> Iterator[Fleet]:
    target = make_tiny_target(directory / "target")
    export_draft(target, directory / "draft")

    def start(listen: str) -> VerifierProcess:
        return start_verifier(*_FLAGS, "--num-threads", "1", target=target, listen=listen)

    with OnnxDraftModel.open(directory / "draft") as draft:
        yield Fleet(start, draft)


@pytest.fixture(scope="module", params=["synthetic", pytest.param("tiny", marks=pytest.mark.slow)])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    is_tiny = request.param == "tiny"
    with tiny_fleet(tmp_path_factory.mktemp("fleet")) if is_tiny else synthetic_fleet() as fleet:
        with contextlib.ExitStack() as kept:
            addresses = [kept.enter_context(kept_address()) for _ in range(3)]
            with ThreadPoolExecutor(3) as pool:
                fleet.verifiers = list(pool.map(fleet.start, addresses))
            try:
                yield fleet
            finally:
                for verifier in fleet.verifiers:
                    verifier.kill()


@pytest.fixture
def fleet(started: Fleet) -> Fleet:
    started.restore()
    return started


def prompt_of(text: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(text).integers(1, 256, size=12)]


def write(
    address: str, text: int, draft: Any, on_token: Callable[[int], None] = lambda index: None
) -> SessionResult:
    """Under `wait`. Odd texts at a temperature, every third one streamed from the target alone."""
    sampling = SamplingParams(temperature=(0.0, 0.8)[text % 2], seed=text)
    drafting = draft if text % 3 else None
    return decode(
        address, prompt_of(text), sampling, draft=drafting, num_new=NUM_NEW, depth=2, on_token=on_token
    )


@pytest.fixture(scope="module")
def expected(started: Fleet) -> list[tuple[int, ...]]:
    """Each text without a fault, as one verifier alone writes it."""
    return [tuple(write(started.verifiers[0].address, text, None).token_ids) for text in range(NUM_TEXTS)]


@dataclass
class Load:
    """Clients that write one text after the other until they are stopped."""

    address: str
    draft: Any
    results: list[tuple[int, SessionResult]] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _written: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @contextlib.contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._run, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def wait_for(self, num_texts: int) -> None:
        """Until so many further texts are written."""
        for _ in range(num_texts):
            assert self._written.acquire(timeout=60), self.errors

    def _run(self, client: int) -> None:
        for text in itertools.count(client):
            if self._is_over.is_set():
                return
            try:
                result = write(self.address, text % NUM_TEXTS, self.draft)
            except BaseException as error:
                self.errors.append(error)
                return
            self.results.append((text % NUM_TEXTS, result))
            self._written.release()


def check(load: Load, expected: Sequence[Sequence[int]]) -> None:
    assert load.errors == []
    for text, result in load.results:
        assert tuple(result.token_ids) == tuple(expected[text])
        assert result.num_unverified_tokens == 0


def test_killing_one_of_three_under_load_changes_no_text(
    fleet: Fleet, expected: list[tuple[int, ...]]
) -> None:
    addresses, killed = fleet.address, threading.Event()
    barrier = threading.Barrier(NUM_TEXTS)

    def on_token(index: int) -> None:
        if index == NUM_NEW // 2 and barrier.wait(60) == 0:  # all are in mid text
            held = [fleet.metric(i, "sessions") for i in range(3)]
            assert sum(held) >= NUM_TEXTS, held  # more where one has moved meanwhile
            fleet.verifiers[held.index(max(held))].kill()
            killed.set()
        if index >= NUM_NEW // 2:
            assert killed.wait(60)

    with ThreadPoolExecutor(NUM_TEXTS) as pool:
        results = list(pool.map(lambda text: write(addresses, text, fleet.draft, on_token), range(NUM_TEXTS)))
    assert [tuple(result.token_ids) for result in results] == expected
    assert all(result.num_unverified_tokens == 0 for result in results)
    assert any(result.stats.num_rebuilds for result in results), "the dead one's sessions moved"


def test_a_rolling_restart_of_three_under_load_shows_no_error_and_no_other_text(
    fleet: Fleet, expected: list[tuple[int, ...]]
) -> None:
    load = Load(fleet.address, fleet.draft)
    with load.running():
        load.wait_for(2)
        for index, verifier in enumerate(fleet.verifiers):
            assert verifier.stop(PATIENCE_S) == 0, "it drained and ended by itself"
            load.wait_for(2)  # two others serve
            fleet.verifiers[index] = fleet.start(verifier.address)
            load.wait_for(2)
    check(load, expected)


def test_a_session_whose_verifier_drains_is_served_by_the_next_while_others_finish_there(
    fleet: Fleet, expected: list[tuple[int, ...]]
) -> None:
    session_id = new_session_id()
    link = GrpcLink(fleet.address, session_id)
    connection = link.connect(PATIENCE_S)
    connection.send(CancelRequest(1))  # of nothing: a stream begins with its first message

    def holders() -> list[int]:
        return [i for i in range(3) if fleet.metric(i, "streams")]

    assert eventually(lambda: len(holders()) == 1), [fleet.metric(i, "streams") for i in range(3)]
    (leaving,) = holders()
    fleet.verifiers[leaving].process.terminate()
    assert eventually(lambda: fleet.metric(leaving, "draining") == 1)
    message = connection.receive(PATIENCE_S)
    assert isinstance(message, Draining)
    again = link.connect(PATIENCE_S)
    again.send(CancelRequest(1))
    assert eventually(lambda: len(holders()) == 2), "the old one serves what is open, another the session"
    for text in range(NUM_TEXTS):
        assert tuple(write(fleet.address, text, fleet.draft).token_ids) == expected[text]
    assert fleet.metric(leaving, "sessions") == 0
    again.close()
    connection.close()
    assert fleet.verifiers[leaving].stop(PATIENCE_S) == 0
