"""Who may call, over the wire: all but health wants a token, and a tenant sees its own sessions only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.calls import (
    Caller,
    Stream,
    bearer,
    eventually,
    is_refused,
    plain_channel,
    status_of,
)
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.security.authenticator import Authenticator
from outrider.cloud_verifier.security.token_file import change_tokens
from outrider.cloud_verifier.security.tokens import TokenRecord, new_token
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.pb import outrider_pb2 as pb
from tests.cloud_verifier.security.bad_tokens import malformed

DENIED, UNAUTHENTICATED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
SESSION_ID = bytes(range(16))
HEADER = (("x-session-id", SESSION_ID.hex()),)


@dataclass
class Secured:
    """A verifier with three tokens in its file, and a channel to it."""

    server: VerifierServer
    channel: grpc.Channel
    path: Path
    tokens: dict[str, str]

    def caller(self, tenant: str, session_id: bytes = SESSION_ID) -> Caller:
        return Caller(self.channel, session_id, bearer(self.tokens[tenant]))

    def revoke(self, tenant: str) -> None:
        token_id = self.tokens[tenant].split("_")[1]
        change_tokens(self.path, lambda old: [revoked(each) if each.id == token_id else each for each in old])


def revoked(record: TokenRecord) -> TokenRecord:
    return replace(record, revoked=datetime.now(UTC))


def make_tokens(path: Path, *tenants: str, lifetime: timedelta | None = None) -> dict[str, str]:
    made = {name: new_token(name, datetime.now(UTC), lifetime, is_admin=name == "admin") for name in tenants}
    change_tokens(path, lambda old: (*old, *(record for _, record in made.values())))
    return {name: text for name, (text, _) in made.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.json"


@pytest.fixture
def secured(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Secured]:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    tokens = make_tokens(path, "acme", "other", "admin")
    config = ServeConfig(tokens=path, reflection=True)
    with serving(FakeBackend(), config) as server, plain_channel(server.port) as channel:
        yield Secured(server, channel, path, tokens)


# ------------------------------------------------------------------------- every method, and health


def methods(*services: str) -> list[Any]:
    pool = descriptor_pool.Default()
    return [method for name in services for method in pool.FindServiceByName(name).methods]


def call(channel: grpc.Channel, method: Any, metadata: Any) -> Any:
    """Any method by its descriptor, with an empty message."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
    request: Any = iter([b""]) if method.client_streaming else b""
    return getattr(channel, kind)(path)(request, metadata=metadata, timeout=60)


def test_every_method_but_health_refuses_a_call_without_credentials(secured: Secured) -> None:
    from grpc_reflection.v1alpha.reflection import SERVICE_NAME

    served = methods("outrider.v1.Verifier", SERVICE_NAME)
    assert {each.name for each in served} >= {"Describe", "Session", "Open", "Verify", "Generate", "Close"}
    wrong = bearer(f"outrider_{'0' * 12}_{'A' * 43}")
    for method in served:
        for metadata in (HEADER, (*HEADER, *wrong), (*HEADER, ("x-outrider-tenant", "acme"))):
            status, details = status_of(lambda m=method, d=metadata: call(secured.channel, m, d))
            assert status is UNAUTHENTICATED, (method.full_name, details)
            assert details in ("the call has no token", "no such token is known here")
        status, _ = status_of(lambda m=method: call(secured.channel, m, bearer(secured.tokens["admin"])))
        assert status is DENIED, method.full_name
    assert not len(secured.server.engine.sessions)


def test_a_method_that_does_not_exist_is_not_even_denied_to_exist(secured: Secured) -> None:
    unknown = secured.channel.unary_unary("/outrider.v1.Verifier/Nothing")
    assert status_of(lambda: unknown(b"", timeout=60))[0] is UNAUTHENTICATED
    with_token = bearer(secured.tokens["acme"])
    assert (
        status_of(lambda: unknown(b"", metadata=with_token, timeout=60))[0] is grpc.StatusCode.UNIMPLEMENTED
    )


def test_health_answers_anybody_and_describe_with_a_token(secured: Secured) -> None:
    health = health_pb2_grpc.HealthStub(secured.channel)
    request = health_pb2.HealthCheckRequest(service="outrider.v1.Verifier")
    assert health.Check(request, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
    watching = health.Watch(request, timeout=60)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
    stub = secured.caller("acme").stub
    assert stub.Describe(pb.DescribeRequest(), metadata=bearer(secured.tokens["acme"])).model_id == "fake"


def test_malformed_tokens_over_the_wire_are_refused(secured: Secured) -> None:
    rng = random.Random(5)
    sent = 0
    while sent < 40:
        value = malformed(rng, secured.tokens["acme"])
        if not isinstance(value, str) or not value.isascii() or not value.isprintable() or len(value) > 7000:
            continue  # gRPC itself would not send it
        sent += 1
        caller = Caller(secured.channel, SESSION_ID, (("authorization", value),))
        assert status_of(caller.open)[0] is UNAUTHENTICATED
    assert not len(secured.server.engine.sessions)


def test_an_oversized_header_harms_nobody(secured: Secured) -> None:
    ours = secured.caller("acme")
    opened = ours.open().opened
    status_of(Caller(secured.channel, SESSION_ID, bearer("A" * 200_000)).open)
    assert ours.verify(opened, 1).verdict.position > opened.position


def test_a_token_is_looked_at_once_a_stream(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    identify = Authenticator.identify
    monkeypatch.setattr(Authenticator, "identify", lambda *each: looks.append(each) or identify(*each))
    stream = Stream(secured.caller("acme"))
    after = stream.open(SESSION_ID)
    for round_id in range(1, 20):
        after = stream.verify(after, round_id)
    stream.close()
    assert len(looks) == 1


# ----------------------------------------------------------------------------------------- tenants


def test_the_tenant_is_the_tokens_and_a_header_that_differs_is_refused(secured: Secured) -> None:
    ours = secured.caller("acme")
    ours.open()
    assert [session.tenant for session in secured.server.engine.sessions] == ["acme"]
    for tenant in ("other", "default", "", "a b"):
        both = (*bearer(secured.tokens["acme"]), ("x-outrider-tenant", tenant))
        status, details = status_of(Caller(secured.channel, SESSION_ID, both).open)
        assert status is DENIED and "x-outrider-tenant" in details
    both = (*bearer(secured.tokens["acme"]), ("x-outrider-tenant", "acme"))
    assert Caller(secured.channel, SESSION_ID, both).open().opened.is_existing, "the same says nothing new"


def test_no_session_of_another_tenant_can_be_read_verified_closed_superseded_or_learnt_of(
    secured: Secured,
) -> None:
    ours, theirs = secured.caller("acme"), secured.caller("other")
    stream = Stream(ours)
    opened = stream.open(SESSION_ID)
    nobodys = secured.caller("other", bytes(16))  # what an id that was never used is answered

    def answers(caller: Caller) -> list[Any]:
        beside = Stream(caller)
        request = pb.VerifyRequest(round_id=1, base_position=opened.position, base_hash=opened.hash)
        found = [caller.verify(opened, 1), caller.generate(opened, 1), caller.close()]
        found.append(beside.ask(verify=request))
        beside.close()
        found.append(caller.open().opened.is_existing)
        caller.close()
        return found

    assert answers(theirs) == answers(nobodys), "nothing tells a foreign session from none"
    verdict = stream.verify(opened, 1)
    assert verdict.position > opened.position, "our stream was not superseded, our session not closed"
    opened_there = theirs.open().opened
    assert not opened_there.is_existing, "the id names a session of each"
    assert theirs.close() and ours.verify(verdict, 2).verdict.position > verdict.position
    stream.close()


def test_limits_count_by_the_tokens_tenant(path: Path) -> None:
    tokens = make_tokens(path, "acme", "other")
    config = ServeConfig(tokens=path, tenant_max_sessions=2)
    with serving(FakeBackend(), config) as server, plain_channel(server.port) as channel:
        for number in range(5):
            Caller(channel, number.to_bytes(16, "big"), bearer(tokens["acme"])).open()
        Caller(channel, SESSION_ID, bearer(tokens["other"])).open()
        held = [session.tenant for session in server.engine.sessions]
    assert sorted(held) == ["acme", "acme", "other"]


# --------------------------------------------------------------------------------------- reloading


def test_a_new_token_is_taken_and_a_revoked_one_refused_while_others_go_on(secured: Secured) -> None:
    ours, theirs = secured.caller("acme"), secured.caller("other", bytes(16))
    our_stream, their_stream = Stream(ours), Stream(theirs)
    opened, theirs_opened = our_stream.open(SESSION_ID), their_stream.open(bytes(16))

    secured.tokens |= {"acme2": make_tokens(secured.path, "acme")["acme"]}
    secured.revoke("acme")
    status, details = status_of(lambda: next(our_stream.call))
    assert status is UNAUTHENTICATED and "ended" in details, "an open stream is cut off"
    status, details = status_of(ours.open)
    assert status is UNAUTHENTICATED and "is revoked" in details

    renewed = Stream(Caller(secured.channel, SESSION_ID, bearer(secured.tokens["acme2"])))
    assert renewed.verify(opened, 1).position > opened.position, "another token of the tenant has its session"
    assert their_stream.verify(theirs_opened, 1).position > 4, "streams of others were not touched"
    renewed.close()
    our_stream.close()
    their_stream.close()


def test_a_generation_without_a_session_stream_ends_with_its_token_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cloud_verifier.server.server.RELOAD_S", 0.02)
    tokens = make_tokens(path, "acme")
    backend, config = FakeBackend(max_context=8000), ServeConfig(tokens=path, min_forward_ms=5.0)
    with serving(backend, config) as server, plain_channel(server.port) as channel:
        caller = Caller(channel, SESSION_ID, bearer(tokens["acme"]))
        after = caller.open().opened
        request = pb.GenerateRequest(
            session_id=SESSION_ID,
            round_id=1,
            base_position=after.position,
            base_hash=after.hash,
            max_new_tokens=7000,
        )
        call = caller.stub.Generate(request, metadata=caller.metadata, timeout=60)
        next(call)
        change_tokens(path, lambda old: [revoked(each) for each in old])
        status, details = status_of(lambda: list(call))
        assert status is UNAUTHENTICATED and "ended" in details
        assert eventually(lambda: server.engine.num_jobs == 0), "the verifier computes it no further"


def test_an_expired_token_is_refused_and_its_stream_ends(secured: Secured) -> None:
    authenticator = secured.server.security.authenticator
    assert authenticator is not None
    text = make_tokens(secured.path, "acme", lifetime=timedelta(days=1))["acme"]
    caller = Caller(secured.channel, SESSION_ID, bearer(text))
    assert eventually(lambda: len(authenticator) == 4)
    stream = Stream(caller)
    stream.open(SESSION_ID)
    authenticator.clock = lambda: datetime.now(UTC) + timedelta(days=1)
    assert status_of(lambda: next(stream.call))[0] is UNAUTHENTICATED
    status, details = status_of(caller.open)
    assert status is UNAUTHENTICATED and "expired at" in details
    stream.close()


def test_a_file_that_breaks_changes_nothing_until_it_is_whole_again(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    whole = secured.path.read_text()
    secured.path.write_text("{")
    assert eventually(lambda: "cannot take up the new tokens, the old ones stay" in caplog.text)
    assert secured.caller("acme").open().opened.position == 4
    secured.path.unlink()
    assert eventually(lambda: "there is no such file" in caplog.text)
    assert secured.caller("acme").open().opened.position == 4
    secured.path.write_text(whole)
    secured.path.chmod(0o600)
    secured.revoke("other")
    other = secured.caller("other", bytes(16))
    assert eventually(lambda: is_refused(other.open))


def test_refusals_are_counted_by_reason_and_logged_without_what_was_sent(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outrider.cloud_verifier")
    secured.revoke("other")
    unknown = f"outrider_{'0' * 12}_{'A' * 43}"
    for sent in ((), bearer("nonsense_of_somebody"), bearer(unknown)):
        status_of(Caller(secured.channel, SESSION_ID, sent).open)
    revoked = secured.tokens["other"]
    assert eventually(lambda: is_refused(secured.caller("other").open))
    status_of(secured.caller("admin").open)
    counts = secured.server.security.num_refused
    assert all(counts[reason] for reason in ("missing", "malformed", "unknown", "revoked", "denied")), counts
    lines = " ".join(f"{vars(record)}" for record in caplog.records)
    assert "refused a call: its token is revoked" in lines and revoked.split("_")[1] in lines
    for secret in (revoked[-43:], "nonsense_of_somebody", "A" * 43):
        assert secret not in lines
