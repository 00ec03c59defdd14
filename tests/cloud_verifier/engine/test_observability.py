"""What an operator sees: metrics and probes over HTTP, spans in a collector, logs; never a user's text."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.calls import eventually, get_url
from support.dev_security import make_dev_security
from support.edge.tiny_draft import make_backend, make_tiny_draft
from support.fakes import FakeBackend
from support.models import make_tiny_target
from support.processes.server import serving
from support.secrets import secrets_of
from tokenizers import Tokenizer

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine import finish
from outrider.cloud_verifier.engine.observe import EngineObserver, Histogram
from outrider.cloud_verifier.server.addresses import check_addresses
from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.errors import UsageError
from outrider.common.pb import outrider_pb2 as pb
from outrider.common.pb import outrider_pb2_grpc
from outrider.common.process.logs import LogLimiter
from outrider.common.types import Method, RoundMetrics, VerifyRequest
from outrider.edge_client.commands.cli import main as edge_main
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.experiments.shared.processes import run_edge, start_verifier
from outrider.experiments.shared.verifier_metrics import MemoryPeaks, memory_peaks, read_metrics

PREFIX = "outrider_verifier_"
MARKER = "value_77 return marker_quagga(self, function_131) + 4761"
Samples = dict[str, float]


def get(server: VerifierServer, path: str, accept: str = "") -> tuple[int, str]:
    assert server.admin is not None
    return get_url(server.admin.url + path, accept)


def scrape(server: VerifierServer) -> Samples:
    """`name{label=value}` → value, without the prefix."""
    status, text = get(server, "/metrics")
    assert status == 200
    samples = {}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            inside = ",".join(f"{key}={labels[key]}" for key in sorted(labels))
            samples[name.removeprefix(PREFIX) + (f"{{{inside}}}" if inside else "")] = value
    return samples


def session_metadata(number: int) -> tuple[tuple[str, str], ...]:
    return (("x-session-id", f"{number:032x}"),)


def opening(number: int, prompt: list[int], **fields: Any) -> pb.OpenRequest:
    return pb.OpenRequest(
        session_id=number.to_bytes(16, "big"),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        ignore_eos=True,
        sampling=pb.SamplingParams(temperature=0.0),
        **fields,
    )


class Caller:
    """Unary calls of one session after another."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub = outrider_pb2_grpc.VerifierStub(channel)

    def open(self, number: int, prompt: list[int], **fields: Any) -> pb.OpenResponse:
        return self.stub.Open(opening(number, prompt, **fields), metadata=session_metadata(number))

    def close(self, number: int) -> pb.CloseResponse:
        request = pb.CloseRequest(session_id=number.to_bytes(16, "big"))
        return self.stub.Close(request, metadata=session_metadata(number))

    def verify(self, number: int, after: Any, round_id: int, draft: list[int]) -> pb.VerifyResponse:
        request = pb.VerifyRequest(
            session_id=number.to_bytes(16, "big"),
            round_id=round_id,
            base_position=after.position,
            base_hash=after.hash,
            draft_tokens=draft,
        )
        return self.stub.Verify(request, metadata=session_metadata(number))

    def generate(self, number: int, after: Any, round_id: int, num_new: int) -> list[pb.GenerateResponse]:
        request = pb.GenerateRequest(
            session_id=number.to_bytes(16, "big"),
            round_id=round_id,
            base_position=after.position,
            base_hash=after.hash,
            max_new_tokens=num_new,
        )
        return list(self.stub.Generate(request, metadata=session_metadata(number)))


# ----------------------------------------------------------------------------------------- metrics


def test_a_scrape_counts_what_a_session_did_exactly() -> None:
    backend = FakeBackend()
    with serving(backend) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        caller = Caller(channel)
        opened = caller.open(1, [5, 6, 7]).opened
        right = backend.logits_after([5, 6, 7, opened.first_token])[:32].argmax()
        verdict = caller.verify(1, opened, 1, [int(right), 31, 31]).verdict
        again = caller.verify(1, opened, 1, [int(right), 31, 31]).verdict
        assert again == verdict, "a replay"
        caller.generate(1, verdict, 2, 4)
        caller.verify(1, verdict, 3, [4_000_000_000])
        caller.verify(9, verdict, 1, [])
        assert eventually(lambda: scrape(server)["verify_seconds_count"] == backend.num_forwards)
        samples = scrape(server)
    accepted = verdict.accepted_len
    assert samples["sessions"] == 1 and samples["streams"] == 0 and samples["draining"] == 0
    assert samples["rounds_total{kind=open}"] == samples["round_seconds_count{kind=open}"] == 1
    assert samples["rounds_total{kind=verify}"] == 1, "the replay computed nothing"
    assert samples["rounds_total{kind=generate}"] == samples["round_seconds_count{kind=generate}"] == 4
    assert samples["queue_seconds_count"] == 1 + 1 + 1, "a generation waits once, before its first step"
    of_method = "{exact=yes,method=coupled}"
    assert samples[f"draft_tokens_total{of_method}"] == 3
    assert samples[f"accepted_tokens_sum{of_method}"] == accepted >= 1
    judged = {
        result: samples[f"judged_tokens_total{{exact=yes,method=coupled,result={result}}}"]
        for result in ("accepted", "rejected")
    }
    assert judged == {"accepted": accepted, "rejected": accepted < 3}
    assert samples[f"new_tokens_total{of_method}"] == 1 + accepted + 1 + 4
    assert samples["new_tokens_total{exact=no,method=typical}"] == 0
    assert samples["batch_size_count"] == samples["forward_seconds_count"] == backend.num_forwards
    assert samples["step_tokens_sum"] == backend.num_query_rows
    assert samples["errors_total{code=invalid}"] == 1
    assert samples["errors_total{code=unknown_session}"] == 1
    dtypes = "dtype=float32,kv_dtype=float32"
    labels = f"device=cpu,{dtypes},model_id=fake,protocol_version=1,quantisation=none,version=0.1.0"
    assert samples[f"info{{{labels}}}"] == 1
    assert 0 < samples["round_seconds_sum{kind=verify}"] < 5 and "process_resident_memory_bytes" in samples


def test_kv_blocks_and_what_the_prefix_cache_gave_are_told() -> None:
    with (
        serving(FakeBackend(kv_tokens=100)) as server,  # whose blocks hold one token
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        caller, prompt = Caller(channel), [5, 6, 7, 8] * 5
        caller.open(1, prompt)
        samples = scrape(server)
        assert samples["kv_blocks{state=used}"] == 20 and samples["kv_blocks{state=empty}"] == 80
        assert samples["kv_block_tokens"] == 1 and samples["prefix_tokens_total{result=hit}"] == 0
        caller.open(2, prompt)
        samples = scrape(server)
        assert samples["prefix_tokens_total{result=hit}"] == 19
        assert samples["prefix_tokens_total{result=miss}"] == 20 + 1
        caller.close(1)
        caller.close(2)
        assert scrape(server)["kv_blocks{state=cached}"] == 20
        caller.open(3, [9] * 50)
        caller.open(4, [10] * 45)
        samples = scrape(server)
        assert samples["kv_blocks{state=used}"] == 95
        assert samples["kv_evicted_blocks_total"] >= 15
        assert (samples["kv_peak_blocks"], samples["kv_peak_share"]) == (95, 0.95)
        caller.close(3)
        samples = scrape(server)
        assert samples["kv_blocks{state=used}"] == 45 and samples["kv_peak_blocks"] == 95
        assert server.admin is not None
        peaks = memory_peaks(read_metrics(server.admin.url))
        assert peaks == MemoryPeaks(kv_tokens=95, kv_share=0.95)
        assert eventually(lambda: scrape(server)["queue_jobs"] == 0)


def test_weights_pool_and_peak_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    sizes = {"max_memory_allocated": 5_000_000, "max_memory_reserved": 7_000_000}
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size if device == "cuda:0" else 0)
    with serving(FakeBackend()) as server:
        samples = scrape(server)
        assert not [name for name in samples if "gpu" in name]
        assert (samples["weights_bytes"], samples["kv_pool_bytes"]) == (1 << 20, 1 << 22)
        assert samples["resident_memory_peak_bytes"] > 10 << 20
        server.engine.backend.device = "cuda:0"
        samples = scrape(server)
        server.engine.backend.device = "cpu"
    found = {name: value for name, value in samples.items() if "gpu" in name}
    assert found == {
        "gpu_memory_peak_bytes{kind=allocated}": 5e6,
        "gpu_memory_peak_bytes{kind=reserved}": 7e6,
    }


def test_evictions_refusals_and_expiries_are_counted_and_logged_without_flooding(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "outrider.cloud_verifier")
    config = ServeConfig(max_sessions=2, session_idle_ttl_s=0.3)
    backend = FakeBackend(kv_tokens=40)
    with serving(backend, config) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        caller = Caller(channel)
        caller.open(1, [5] * 30)
        caller.open(2, [6] * 30)
        assert scrape(server)["evictions_total{what=kv}"] == 1
        caller.open(3, [7] * 30)
        for _ in range(5):
            assert caller.open(4, [8] * 50).error.code == pb.ROUND_ERROR_CODE_REFUSED
        samples = scrape(server)
        assert samples["evictions_total{what=session}"] >= 1
        assert samples["refusals_total{reason=kv}"] == samples["errors_total{code=refused}"] == 5
        assert eventually(lambda: scrape(server)["sessions"] == 0)
        assert scrape(server)["expired_sessions_total"] >= 1
    lines = [record for record in caplog.records if record.getMessage() == "refused a request: no room"]
    assert len(lines) == 1 and lines[0].session == "00000000"  # type: ignore[attr-defined]


def test_rounds_that_fail_after_their_forward_are_internal_errors_with_few_traces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judge = finish._judge

    def judge_or_fail(work: Any, rows: Any) -> Any:
        if isinstance(work.request, VerifyRequest):
            raise RuntimeError("a planted fault")
        return judge(work, rows)

    monkeypatch.setattr(finish, "_judge", judge_or_fail)
    with serving(FakeBackend()) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        caller = Caller(channel)
        for number in range(8):
            opened = caller.open(number, [5, 6, 7]).opened
            answer = caller.verify(number, opened, 1, [1, 2])
            assert answer.error.code == pb.ROUND_ERROR_CODE_INTERNAL
        samples = scrape(server)
    assert samples["errors_total{code=internal}"] == 8 and samples["failed_steps_total"] == 0
    lines = [
        each for each in caplog.records if each.getMessage() == "a VerifyRequest failed, and its session ends"
    ]
    assert 1 <= len(lines) <= 3, "one a second"
    assert lines[0].exc_info is not None and lines[0].session == f"{0:08x}"  # type: ignore[attr-defined]


def test_steps_that_fail_leave_few_traces(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeBackend):
        def forward(self, items: Any) -> Any:
            raise RuntimeError("a planted fault")

    with serving(Failing()) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for number in range(8):
            answer = Caller(channel).open(number, [5, 6, 7])
            assert answer.error.code == pb.ROUND_ERROR_CODE_INTERNAL
        samples = scrape(server)
    assert samples["errors_total{code=internal}"] == samples["failed_steps_total"] == 8
    lines = [each for each in caplog.records if each.getMessage() == "a step of 1 sessions failed"]
    assert 1 <= len(lines) <= 3 and lines[0].exc_info is not None


def test_probes_follow_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeBackend()) as server:
        assert get(server, "/healthz") == get(server, "/readyz") == (200, "ok\n")
        version = json.loads(get(server, "/version")[1])
        assert version["target_fingerprint"] == "f" * 16 and version["version"]
        assert get(server, "/nothing")[0] == 404
        server.engine.is_draining = True
        assert get(server, "/readyz") == (503, "draining\n") and get(server, "/healthz")[0] == 200
        assert scrape(server)["draining"] == 1
        server.engine.is_running = False
        assert get(server, "/healthz")[0] == 503


def test_two_verifiers_of_one_process_count_apart_and_openmetrics_is_spoken() -> None:
    with serving(FakeBackend()) as one, serving(FakeBackend()) as other:
        with grpc.insecure_channel(f"127.0.0.1:{one.port}") as channel:
            Caller(channel).open(1, [5, 6, 7])
        assert (scrape(one)["sessions"], scrape(other)["sessions"]) == (1, 0)
        status, text = get(one, "/metrics", "application/openmetrics-text; version=1.0.0")
        assert status == 200 and text.endswith("# EOF\n")


def test_scrapes_and_rounds_go_on_together() -> None:
    with serving(FakeBackend()) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        caller, is_over, failures = Caller(channel), threading.Event(), []

        def scrape_on() -> None:
            while not is_over.is_set():
                try:
                    scrape(server)
                except Exception as error:
                    failures.append(error)

        scraper = threading.Thread(target=scrape_on)
        scraper.start()
        for number in range(40):
            opened = caller.open(number, [5, 6, 7]).opened
            caller.verify(number, opened, 1, [1, 2])
        is_over.set()
        scraper.join()
        assert not failures and scrape(server)["rounds_total{kind=verify}"] == 40


@pytest.mark.parametrize(
    ("listen", "words"),
    [("0.0.0.0:0", "--insecure"), ("7078", "HOST:PORT"), ("localhost:99999", "HOST:PORT")],
)
def test_the_admin_port_is_checked_like_the_other(listen: str, words: str) -> None:
    with pytest.raises(UsageError, match=f"--admin-listen {listen}: .*{words}"):
        check_addresses(ServeConfig(admin_listen=listen))


@pytest.mark.parametrize("off", ["", "none"])
def test_the_admin_port_can_be_off(off: str) -> None:
    assert VerifierServer(FakeBackend(), ServeConfig(admin_listen=off)).admin is None


def test_a_taken_admin_port_is_one_clear_error() -> None:
    async def start(port: int) -> None:
        async with VerifierServer(
            FakeBackend(), ServeConfig(listen="127.0.0.1:0", admin_listen=f"127.0.0.1:{port}")
        ):
            pass

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--admin-listen 127.0.0.1:{port}: cannot bind"):
            asyncio.run(start(port))


def test_reflection_lists_the_services_only_when_asked_for() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    for is_on in (True, False):
        with (
            serving(FakeBackend(), ServeConfig(reflection=is_on)) as server,
            grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
            if is_on:
                names = [service.name for service in next(answers).list_services_response.service]
                assert "outrider.v1.Verifier" in names and "grpc.health.v1.Health" in names
            else:
                with pytest.raises(grpc.RpcError) as raised:
                    next(answers)
                assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ------------------------------------------------------------------------------------------- parts


def test_a_bucket_holds_its_upper_end() -> None:
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 2, 3, 4, 5):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 2, 1], 15)


def test_a_limited_line_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    limiter = LogLimiter(logging.getLogger("cloud_verifier.x"), 1.0, clock=lambda: now_s[0])
    caplog.set_level(logging.INFO, "cloud_verifier.x")
    for now_s[0] in (0.0, 0.1, 0.9, 1.0, 1.1, 5.0):
        limiter.info("full", "refused", {"reason": "full"})
    assert [getattr(record, "num_left_out", 0) for record in caplog.records] == [0, 2, 1]


def test_counting_a_round_costs_microseconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outrider.cloud_verifier")
    observer, metrics = EngineObserver(), RoundMetrics(0.5, 0.5, 123_456, 4_567_890, 6_789_012, 4)
    times = []
    for _ in range(5):
        start_ns = time.thread_time_ns()
        for round_id in range(1000):
            observer.on_round(
                VerifyRequest(round_id, 0, 0),
                b"s" * 16,
                Method.COUPLED,
                num_draft_tokens=4,
                num_accepted_tokens=3,
                judged_tokens=(3, 1),
                has_correction=True,
                answered_ns=None,
                metrics=metrics,
            )
            observer.on_step(4, 20, 4_567_890, 123_456)
        times.append((time.thread_time_ns() - start_ns) / 1000)
    assert min(times) < 20_000, f"{min(times):.0f} ns a round"


# ------------------------------------------------------------------------------------------- spans


class Collector:
    """An OTLP collector that keeps what it is sent."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        collector = self
        self.spans: list[tuple[str, Any]] = []  # (service name, span)
        self.text = ""

        class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
            def Export(self, request: Any, context: Any) -> Any:
                for each in request.resource_spans:
                    names = {a.key: a.value.string_value for a in each.resource.attributes}
                    for scope in each.scope_spans:
                        collector.spans += [(names["service.name"], span) for span in scope.spans]
                collector.text += str(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._server.stop(None)

    def of(self, service: str) -> list[Any]:
        return [span for name, span in self.spans if name == service]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def leaks(text: str, prompt: str, token_ids: list[int]) -> list[str]:
    """Pieces of the prompt, and runs of three of its token ids, that `text` holds."""
    found = [word for word in (*prompt.split(), prompt) if len(word) > 7 and word in text]
    for i in range(len(token_ids) - 2):
        run = r"\b" + r"\D{1,40}?".join(map(str, token_ids[i : i + 3])) + r"\b"
        found += [match.group() for match in re.finditer(run, text)]
    return found


def test_the_search_for_leaks_finds_them() -> None:
    assert leaks("x marker_quagga(self, y", MARKER, [])
    assert leaks("ids [7, 300, 12, 5]", "", [300, 12, 5]) and leaks("a: 300\nb: 12\nc: 5", "", [300, 12, 5])
    assert not leaks("took 300 ms of 12", MARKER, [300, 12, 5])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("observed")
    target = make_tiny_target(root / "target", hidden=64, num_layers=1)
    export_draft(target, root / "draft")
    return target, root / "draft"


def test_a_run_is_one_trace_and_no_text_leaves_by_spans_metrics_or_logs(
    collector: Collector, pair: tuple[Path, Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, draft = pair
    security = make_dev_security(tmp_path, "acme")
    verifier = start_verifier(
        *("--admin-listen", "127.0.0.1:0", "--otlp-endpoint", collector.url),
        *("--log-level", "debug", "--log-json"),
        *security.serve_flags,
        target=target,
    )
    admin = verifier.admin_url
    prompt_ids = Tokenizer.from_file(str(draft / "tokenizer.json")).encode(MARKER).ids
    seen = ""
    rounds = ["--mode", "speculative", "--pipeline", "off", "--on-timeout", "wait"]
    for more in (
        [*rounds, "--transport", "stream"],
        [*rounds, "--transport", "unary"],
        ["--mode", "cloud-only"],
    ):
        done = run_edge(
            ["run", MARKER, "--json", "--verifier", verifier.address, "--draft", str(draft), *more]
            + security.edge_flags
            + ["--max-new-tokens", "16", "--ignore-eos", "--log-level", "debug"]
            + ["--otlp-endpoint", collector.url]
        )
        assert done.returncode == 0, done.stderr
        seen += done.stderr + done.stdout
        check_no_leak(done.stderr, json.loads(done.stdout)["token_ids"])
        status, metrics = get_url(f"{admin}/metrics")
        assert status == 200 and PREFIX + "new_tokens_total" in metrics
        check_no_leak(metrics, prompt_ids)
        seen += metrics
    assert verifier.stop() == 0
    logs = capfd.readouterr().err
    check_no_leak(logs, prompt_ids)
    check_no_leak(collector.text, prompt_ids)
    seen += logs + collector.text
    assert not [secret for secret in secrets_of(security) if secret in seen], "a token or a key came out"

    entries = [json.loads(line) for line in logs.splitlines()]
    answered = [entry for entry in entries if entry["message"] == "answered"]
    assert {entry["kind"] for entry in answered} == {"open", "verify", "generate"}
    assert all(len(entry["session"]) == 8 and "round_id" in entry for entry in answered)

    clients, servers = collector.of("edge-client"), collector.of("cloud-verifier")
    assert len(clients) == 3 and len({span.trace_id for span in clients}) == 3
    for client, names in zip(
        clients, ({"open", "verify"}, {"open", "verify"}, {"open", "generate"}), strict=True
    ):
        rounds = [span for span in servers if span.trace_id == client.trace_id]
        assert {span.name for span in rounds} == {f"outrider.{name}" for name in names}
        assert {span.parent_span_id for span in rounds} == {client.span_id}
        for span in rounds:
            facts = attributes(span)
            assert facts["outrider.session"] == attributes(client)["outrider.session"]
            assert facts["outrider.forward_ms"] > 0 and "outrider.round_id" in facts
            assert client.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano


def check_no_leak(text: str, token_ids: list[int]) -> None:
    assert len(token_ids) > 6 and not (found := leaks(text, MARKER, token_ids)), found


def test_debug_logs_for_a_person_hold_no_text_even_when_the_engine_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    draft = make_tiny_draft(tmp_path)
    backend = make_backend(draft)
    prompt_ids = Tokenizer.from_file(str(draft / "tokenizer.json")).encode(MARKER).ids
    backend.fail_next = RuntimeError("a broken target")
    with serving(backend) as server:
        flags = ["--verifier", f"127.0.0.1:{server.port}", "--draft", str(draft), "--log-level", "debug"]
        assert edge_main(["run", MARKER, *flags, "--max-new-tokens", "12", "--json"]) == 0
        assert edge_main(["run", MARKER * 60, *flags]) != 0
    shown = capfd.readouterr()
    assert "a broken target" in shown.err and "outrider.cloud_verifier.engine.observe: answered" in shown.err
    check_no_leak(shown.err, prompt_ids)


def test_without_a_provider_nothing_is_imported_or_sent() -> None:
    code = (
        "import sys; from outrider.common.process.tracing import find_tracer; "
        "from outrider.edge_client.transport.link.trace import SessionTrace; "
        "assert find_tracer() is None and SessionTrace('a:1', bytes(16)).begin().metadata == (); "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_collector_address_that_is_no_url_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert edge_main(["run", "x", "--otlp-endpoint", "localhost:4317"]) == 2
    assert "--otlp-endpoint localhost:4317: want a URL" in capsys.readouterr().err
