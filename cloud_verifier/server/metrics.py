"""A verifier's numbers as Prometheus families, read at every scrape. docs/observability.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outrider.cloud_verifier.engine.observe import Histogram, memory_use
from outrider.cloud_verifier.rpc.ended_calls import EndedCalls

if TYPE_CHECKING:
    from outrider.cloud_verifier.engine.engine import Engine
    from outrider.cloud_verifier.security.server_security import ServerSecurity

PREFIX = "outrider_verifier_"
BACKLOG_REASONS = ("queue_tokens", "tenant_queue_tokens", "queue_ms", "deadline")
_S_PER_NS = 1e-9
_OF_METHOD = ("method", "exact")  # exact="no": that text is not the target's


def make_registry(
    engine: Engine,
    num_streams: Callable[[], int],
    security: ServerSecurity | None = None,
    ended_calls: EndedCalls | None = None,
) -> CollectorRegistry:
    """Returns a registry of this verifier and its process; nothing is global, so a process may have several."""
    registry = CollectorRegistry()
    registry.register(VerifierCollector(engine, num_streams, ended_calls or EndedCalls()))
    if security is not None:
        registry.register(SecurityCollector(security))
    ProcessCollector(registry=registry)
    return registry


class VerifierCollector(Collector):
    """Reads counters and lengths that the engine and the calls write; takes no lock."""

    def __init__(self, engine: Engine, num_streams: Callable[[], int], ended_calls: EndedCalls) -> None:
        self._engine = engine
        self._ended_calls = ended_calls
        self._num_streams = num_streams

    def describe(self) -> list[Metric]:
        """Returns nothing: families are fixed, so registering need not collect."""
        return []  # families are fixed: registering need not collect

    def collect(self) -> Iterator[Metric]:
        """Yields every family with its present values."""
        yield self._info()
        yield from self._state()
        yield from self._kv()
        yield from self._memory()
        yield from self._steps()
        yield from self._rounds()
        yield from self._exceptions()

    def _info(self) -> Metric:
        model = self._engine.model
        facts = {
            "version": model.server_version,
            "protocol_version": str(model.protocol_version),
            "model_id": model.model_id,
            "dtype": model.dtype,
            "kv_dtype": model.kv_dtype,
            "device": model.device,
            "quantisation": model.quantisation or "none",
        }
        return InfoMetricFamily(PREFIX.rstrip("_"), "What this verifier serves.", facts)

    def _state(self) -> Iterator[Metric]:
        engine = self._engine
        yield _gauge("sessions", "Sessions held.", len(engine.sessions))
        yield _gauge("sessions_limit", "Sessions held at once at most.", engine.sessions.max_sessions)
        yield _gauge("streams", "Open Session calls.", self._num_streams())
        yield _gauge("draining", "1 while no new session is taken.", float(engine.is_draining))
        yield _gauge("queue_jobs", "Requests that wait or are being computed.", engine.num_jobs)
        num_round_tokens, num_prefill_tokens = engine.backlog.num_tokens()
        lanes = {"round": num_round_tokens, "prefill": num_prefill_tokens}
        yield _gauges("queue_tokens", "Tokens these have to be fed.", lanes, label="lane")

    def _kv(self) -> Iterator[Metric]:
        usage, observer = self._engine.backend.kv_usage, self._engine.observer
        blocks = {"used": usage.num_used, "cached": usage.num_cached, "empty": usage.num_empty}
        yield _gauges(
            "kv_blocks",
            "KV blocks: held by sessions, known only to the prefix cache, empty.",
            blocks,
            label="state",
        )
        yield _gauge("kv_block_tokens", "Tokens in a KV block.", usage.block_size)
        yield _gauge("kv_peak_blocks", "Most KV blocks held by sessions at once so far.", usage.num_peak)
        yield _gauge("kv_peak_share", "The same as a share of the pool.", usage.peak_share)
        yield _counter("kv_evicted_blocks", "Cached KV blocks given up for new text.", usage.num_evicted)
        yield _counters(
            "prefix_tokens",
            "Tokens of sequences when they began: found in the prefix cache, or to be computed.",
            {"hit": observer.num_hit_tokens, "miss": observer.num_miss_tokens},
            label="result",
        )

    def _memory(self) -> Iterator[Metric]:
        backend = self._engine.backend
        use = memory_use(backend)
        yield _gauge("weights_bytes", "Memory of the target's weights.", use.weights)
        yield _gauge("kv_pool_bytes", "Memory of the KV pool.", use.kv)
        if not backend.device.startswith("cuda"):
            yield _gauge("resident_memory_peak_bytes", "Most resident memory so far.", use.peak)
            return
        peaks = {"allocated": use.peak, "reserved": use.peak_reserved}
        yield _gauges("gpu_memory_peak_bytes", "Most GPU memory so far.", peaks, label="kind")

    def _steps(self) -> Iterator[Metric]:
        observer = self._engine.observer
        yield _histogram("batch_size", "Sessions in one packed forward.", observer.batch_size)
        yield _histogram("step_tokens", "Tokens fed in one packed forward.", observer.step_tokens)
        yield _seconds("forward_seconds", "Time of one packed forward.", {"": observer.forward_ns})
        yield _seconds(
            "verify_seconds",
            "Time a step took after its forward: verifying, committing, answering.",
            {"": observer.verify_ns},
        )
        yield _counter("failed_steps", "Forwards that raised; see the log.", observer.num_failed_steps)

    def _rounds(self) -> Iterator[Metric]:
        observer = self._engine.observer
        yield _counters(
            "rounds", "Openings, rounds and steps of generations answered.", observer.num_rounds, label="kind"
        )
        yield _seconds(
            "round_seconds",
            "Time from a request's arrival to its answer; of a generation, of each step from the one before.",
            observer.round_ns,
            label="kind",
        )
        yield _seconds("queue_seconds", "Time from arrival to the first forward.", {"": observer.queue_ns})
        methods = self._engine.model.methods
        drafted = CounterMetricFamily(
            PREFIX + "draft_tokens", "Tokens of drafts, of trees all.", labels=_OF_METHOD
        )
        judged = CounterMetricFamily(
            PREFIX + "judged_tokens",
            "Tokens of chains, and of trees' likeliest paths, up to the first one rejected.",
            labels=(*_OF_METHOD, "result"),
        )
        accepted = HistogramMetricFamily(
            PREFIX + "accepted_tokens",
            "Drafted tokens accepted in a round that drafted.",
            labels=_OF_METHOD,
        )
        new = CounterMetricFamily(
            PREFIX + "new_tokens",
            "Tokens committed by this verifier: accepted and its own.",
            labels=_OF_METHOD,
        )
        for method in methods:
            labels = [str(method), "yes" if method.is_exact else "no"]
            drafted.add_metric(labels, observer.num_draft_tokens[method])
            for result, number in observer.num_judged_tokens[method].items():
                judged.add_metric([*labels, result], number)
            accepted.add_metric(labels, *_buckets(observer.accepted_tokens[method], 1))
            new.add_metric(labels, observer.num_new_tokens[method])
        yield from (drafted, judged, accepted, new)

    def _exceptions(self) -> Iterator[Metric]:
        engine, observer = self._engine, self._engine.observer
        refusals = {
            **dict.fromkeys(BACKLOG_REASONS, 0),
            **engine.backlog.num_refused,
            **observer.refusals,
            **self._ended_calls.num_refused,
        }
        yield _counters("errors", "Requests answered with an error.", observer.errors, label="code")
        yield _counters("refusals", "Requests and calls there was no room for.", refusals, label="reason")
        ended = self._ended_calls.num_ended
        yield _counters("ended_calls", "Calls that the verifier ended.", ended, label="reason")
        yield _counters("evictions", "Idle sessions that made room.", observer.evictions, label="what")
        yield _counter("expired_sessions", "Sessions forgotten after their TTL.", observer.num_expired)


class SecurityCollector(Collector):
    """Reads the number of refused calls, and when the certificate expires."""

    def __init__(self, security: ServerSecurity) -> None:
        self._security = security

    def describe(self) -> list[Metric]:
        """Returns nothing: families are fixed."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields the families that the verifier's credentials need."""
        if self._security.authenticator is not None or self._security.interceptors:
            about, refused = "Calls without the credentials they need.", self._security.num_refused
            yield _counters("refused_calls", about, refused, label="reason")
        if self._security.certificates is not None:
            expires_s = self._security.certificates.expires.timestamp()
            yield _gauge("certificate_expiry_timestamp_seconds", "When the certificate expires.", expires_s)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)


def _gauges(name: str, text: str, values: Mapping[str, float], *, label: str) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _counters(name: str, text: str, values: Mapping[str, int], *, label: str) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], value)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text)
    family.add_metric([], *_buckets(histogram, 1))
    return family


def _seconds(name: str, text: str, by_label: Mapping[str, Histogram], label: str = "") -> Metric:
    family = HistogramMetricFamily(PREFIX + name, text, labels=[label] if label else [])
    for key, histogram in by_label.items():
        family.add_metric([key] if label else [], *_buckets(histogram, _S_PER_NS))
    return family


def _buckets(histogram: Histogram, scale: float) -> tuple[list[tuple[str, float]], float]:
    counts, total = list(histogram.counts), histogram.total
    buckets: list[tuple[str, float]] = []
    num_so_far = 0
    for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
        num_so_far += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound * scale:g}", num_so_far))
    return buckets, total * scale
