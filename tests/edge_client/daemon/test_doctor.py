"""`edge-client doctor` names the fault, and what to do, for everything that commonly goes wrong."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.dev_security import DevSecurity, make_dev_security
from support.fakes import FakeBackend
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.edge_client.commands.doctor import examine
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.doctor.finding import Finding, Status
from outrider.experiments.shared.processes import run_edge


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> DevSecurity:
    return make_dev_security(tmp_path_factory.mktemp("security"))


@pytest.fixture(scope="module")
def plain() -> Iterator[VerifierServer]:
    """Of another tokenizer than the embedded draft's."""
    with serving(FakeBackend()) as server:
        yield server


@pytest.fixture(scope="module")
def secure(security: DevSecurity) -> Iterator[VerifierServer]:
    certificate, key = security.certificates.server
    config = ServeConfig(tls_cert=certificate, tls_key=key, tokens=security.tokens_file)
    with serving(FakeBackend(), config) as server:
        yield server


def faults(port: int, **settings: object) -> list[Finding]:
    config = run_config(verifier=f"127.0.0.1:{port}", **settings)
    found = examine(config, has_trial=False)
    wrong = [each for each in found if each.status is Status.FAULT]
    assert all(each.todo for each in wrong), "each fault has its remedy"
    assert not any(each.todo in each.found for each in wrong), "and says it once"
    return wrong


def only(found: list[Finding]) -> tuple[str, str]:
    assert len(found) == 1, found
    return found[0].check, f"{found[0].found} -> {found[0].todo}"


def test_with_everything_in_order_it_measures_and_ends_with_0(verifier: VerifierServer) -> None:
    done = run_edge(["doctor", "--verifier", f"127.0.0.1:{verifier.port}", "--json"])
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["ok"], done.stdout
    found = {each["check"]: each for each in told["findings"]}
    assert {"draft", "clock", "verifier", "protocol", "link", "clocks", "tokenizer", "load"} <= set(found)
    assert found["link"]["facts"]["rtt_ms"] > 0 and found["link"]["facts"]["jitter_ms"] >= 0
    assert abs(found["clocks"]["facts"]["ahead_ms"]) < 1000, "it is the same clock"
    assert found["load"]["facts"]["queue_ms"] is not None
    memory = found["memory"]["facts"]
    assert memory["weights"] > 10 << 20 and memory["peak"] > memory["weights"] and memory["kv"] > 1 << 20
    assert " resident" in found["memory"]["found"]


def test_a_trial_takes_no_fault_from_settings_that_go_with_others_than_its_own(
    verifier: VerifierServer,
) -> None:
    address, ends_at_once = f"127.0.0.1:{verifier.port}", tuple(map(str, range(10)))
    for settings in ({"reverify": True}, {"stop": ends_at_once}, {"regex": "a"}):
        found = examine(run_config(verifier=address, **settings))
        assert not [each for each in found if each.status is Status.FAULT]


def test_memory_is_told_without_peaks_where_batch_sizes_are_hidden() -> None:
    with serving(FakeBackend(), ServeConfig(hide_batch_size=True)) as server:
        found = {each.check: each for each in examine(run_config(verifier=f"127.0.0.1:{server.port}"), False)}
    assert found["memory"].found == "its weights 1MiB, KV 4MiB"


def test_no_verifier() -> None:
    check, text = only(faults(1))
    assert check == "verifier" and "no verifier listens there" in text and "cloud-verifier serve" in text


def test_the_wrong_port(plain: VerifierServer) -> None:
    assert plain.admin is not None
    check, text = only(faults(plain.admin.port))
    assert check == "verifier" and "HTTP/1" in text and "--listen" in text


def test_a_port_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.edge_client.doctor.remote._TIMEOUT_S", 0.5)
    monkeypatch.setattr("outrider.edge_client.doctor.remote._SNIFF_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        check, text = only(faults(silent.getsockname()[1]))
    assert check == "verifier" and "firewall" in text


def test_another_tokenizer(plain: VerifierServer) -> None:
    check, text = only(faults(plain.port))
    assert check == "tokenizer" and "draft export" in text


def test_a_verifier_of_another_protocol(plain: VerifierServer) -> None:
    model = plain.engine.model
    plain.engine.model = replace(model, protocol_version=0)
    try:
        found = {each.check: each for each in faults(plain.port)}
    finally:
        plain.engine.model = model
    assert "the verifier's is older" in found["protocol"].found and "same version" in found["protocol"].todo


def test_a_method_that_is_not_offered(plain: VerifierServer) -> None:
    model = plain.engine.model
    plain.engine.model = replace(model, methods=model.methods[:1])
    try:
        found = {each.check: each.todo for each in faults(plain.port, method="block")}
    finally:
        plain.engine.model = model
    assert "--methods block" in found["settings"]


def test_a_file_that_the_draft_would_not_read(verifier: VerifierServer, tmp_path: Path) -> None:
    check, told = only(faults(verifier.port, datastore=tmp_path))
    assert check == "settings" and told.startswith(
        "--datastore goes with a --draft-strategy that has retrieval"
    )


def test_plaintext_to_a_verifier_that_speaks_tls(secure: VerifierServer) -> None:
    check, text = only(faults(secure.port))
    assert check == "verifier" and "speaks TLS" in text and "--tls-ca" in text


def test_tls_to_a_verifier_that_does_not(plain: VerifierServer, security: DevSecurity) -> None:
    _, text = only(faults(plain.port, tls_ca=security.certificates.ca))
    assert "does not speak TLS" in text


def test_the_wrong_certificate(secure: VerifierServer, security: DevSecurity, tmp_path: Path) -> None:
    other = make_dev_security(tmp_path)
    settings = {"tls_server_name": "localhost", "token_file": security.token_file}
    _, text = only(faults(secure.port, tls_ca=other.certificates.ca, **settings))
    assert "not the authority of its certificate" in text
    ca = security.certificates.ca
    _, text = only(faults(secure.port, tls_ca=ca, **settings | {"tls_server_name": "elsewhere.example"}))
    assert "not for elsewhere.example" in text


def test_the_wrong_token(secure: VerifierServer, security: DevSecurity, tmp_path: Path) -> None:
    settings = {"tls_ca": security.certificates.ca, "tls_server_name": "localhost"}
    check, text = only(faults(secure.port, **settings, token_file=make_dev_security(tmp_path).token_file))
    assert check == "token" and "cloud-verifier token new" in text
    check, text = only(faults(secure.port, **settings))
    assert check == "token" and "--token-file" in text
    assert only(faults(secure.port, **settings, token_file=security.token_file))[0] == "tokenizer"


def test_a_draft_that_is_not_there(plain: VerifierServer, tmp_path: Path) -> None:
    check, text = only(faults(plain.port, draft=str(tmp_path / "none")))
    assert check == "draft" and "draft export" in text
