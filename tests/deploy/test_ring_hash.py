"""Several verifiers behind the edge's own ring hash: who gets a session, and who when that one is gone."""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.dev_security import make_dev_security
from support.fakes import FakeBackend
from support.processes.decoding import decode
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.errors import LinkError, LinkFaultError, UsageError
from outrider.common.types import SamplingParams
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.edge_client.transport.link.probe import probe
from outrider.edge_client.transport.link.security import link_security
from outrider.edge_client.transport.link.targets import parse_target

TIMEOUT_S = 5.0


@dataclass
class Fleet:
    """In-process verifiers whose model's name says which one answers."""

    servers: list[VerifierServer]
    stacks: list[contextlib.ExitStack]

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def holder(self, session_id: bytes, address: str = "", timeout_s: float = TIMEOUT_S) -> int:
        """Which of them a fresh connection of this session meets."""
        model = GrpcLink(address or self.address, session_id).describe(timeout_s)
        return int(model.model_id)

    def holders(
        self, sessions: Sequence[bytes], address: str = "", timeout_s: float = TIMEOUT_S
    ) -> list[int]:
        with ThreadPoolExecutor(12) as pool:  # closing a young channel takes gRPC 0.2 s
            return list(pool.map(lambda session: self.holder(session, address, timeout_s), sessions))

    def end(self, index: int) -> None:
        self.stacks[index].close()


@contextlib.contextmanager
def fleet_of(count: int, config: ServeConfig | None = None) -> Iterator[Fleet]:
    fleet = Fleet([], [])
    with contextlib.ExitStack() as everything:
        for index in range(count):
            backend, stack = FakeBackend(), everything.enter_context(contextlib.ExitStack())
            backend.model_id = str(index)
            fleet.servers.append(stack.enter_context(serving(backend, config)))
            fleet.stacks.append(stack)
        yield fleet


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with fleet_of(3) as fleet:
        yield fleet


def test_every_connection_of_a_session_meets_the_same_verifier_and_sessions_spread(fleet: Fleet) -> None:
    sessions = [new_session_id() for _ in range(48)]
    holders = fleet.holders(sessions)
    assert fleet.holders(sessions) == holders
    assert min(Counter(holders)[index] for index in range(3)) >= 4, Counter(holders)


@pytest.mark.parametrize("transport", ["stream", "unary"])
def test_a_text_is_written_by_the_verifier_of_its_session_alone(fleet: Fleet, transport: str) -> None:
    one_port = f"127.0.0.1:{fleet.servers[0].port}"
    sampling = SamplingParams(temperature=0.8, seed=3)
    expected = decode(one_port, (5, 6, 7), sampling, num_new=12).token_ids
    before = [server.engine.backend.num_forwards for server in fleet.servers]  # type: ignore[attr-defined]
    result = decode(fleet.address, (5, 6, 7), sampling, num_new=12, transport=transport)
    after = [server.engine.backend.num_forwards for server in fleet.servers]  # type: ignore[attr-defined]
    assert result.token_ids == expected and result.stats.num_rebuilds == 0
    assert sum(now > then for now, then in zip(after, before, strict=True)) == 1


def test_a_dead_verifiers_sessions_go_to_the_next_and_the_others_stay(fleet: Fleet) -> None:
    sessions = [new_session_id() for _ in range(60)]
    before = fleet.holders(sessions)
    address, (victim, _) = fleet.address, Counter(before).most_common(1)[0]  # 20 or more, for two to share
    fleet.end(victim)
    after = fleet.holders(sessions, address)
    assert victim not in after
    assert all(now == then for now, then in zip(after, before, strict=True) if then != victim)
    assert len({now for now, then in zip(after, before, strict=True) if then == victim}) == 2


def test_a_verifier_that_takes_connections_and_says_nothing_is_passed_over(fleet: Fleet) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        address = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{fleet.servers[0].port}"
        holders = fleet.holders([new_session_id() for _ in range(6)], address, timeout_s=2.0)
    assert holders == [0] * 6


def test_all_addresses_of_a_name_are_meant_by_dns(fleet: Fleet) -> None:
    address = f"dns:///localhost:{fleet.servers[1].port}"
    assert fleet.holder(new_session_id(), address) == 1
    found = probe(fleet.address, count=3)
    assert len(found.answers_ms) == 3


def test_where_no_verifier_is_left_the_first_ones_trouble_is_told(fleet: Fleet) -> None:
    address = fleet.address
    for index in range(3):
        fleet.end(index)
    with pytest.raises(LinkError, match="connection refused: no verifier listens there"):
        GrpcLink(address, new_session_id()).connect(1.0)


def test_several_verifiers_over_tls_have_one_name_and_every_one_wants_the_token(tmp_path: Path) -> None:
    security = make_dev_security(tmp_path)
    settings = {key: Path(value) for key, value in security.serve_settings.items()}
    with fleet_of(2, ServeConfig(**settings)) as fleet:  # type: ignore[arg-type]
        met, num_links = set[str](), 0
        while met != {"0", "1"}:
            link = GrpcLink(fleet.address, new_session_id(), security=security.link)
            met.add(link.describe(TIMEOUT_S).model_id)
            num_links += 1
            assert num_links < 64, f"all of them met {met}"
        with pytest.raises(LinkFaultError, match="it speaks TLS and this edge does not"):
            GrpcLink(fleet.address, new_session_id()).connect(1.0)


def test_addresses_that_cannot_work_are_refused_by_name() -> None:
    for text in ("nowhere", "a:7077,b", "a:7077,", "dns:///a", "a:0,b:7077"):
        with pytest.raises(UsageError, match=r"--verifier .*want HOST:PORT"):
            parse_target(text)
    with pytest.raises(UsageError, match="--tls-server-name"):
        link_security(run_config(tls=True).connection, "a.example:7077,b.example:7077")
    token = run_config(token="outrider_x").connection
    link_security(token, "127.0.0.1:7077,localhost:7078")
    with pytest.raises(UsageError, match="the token would travel unencrypted"):
        link_security(token, "127.0.0.1:7077,b.example:7078")


def test_a_list_of_hosts_is_asked_of_dns_and_one_without_an_address_is_left_out() -> None:
    target = parse_target("localhost:7077, 127.0.0.2:7078, no-such-host.invalid:7079")
    assert target.grpc_name() == "ipv4:127.0.0.1:7077,127.0.0.2:7078"
    assert parse_target("[::1]:1,[::1]:2").grpc_name() == "ipv6:[::1]:1,[::1]:2"
    with pytest.raises(LinkError, match="there is no such host"):
        parse_target("a.invalid:1,b.invalid:2").grpc_name()
