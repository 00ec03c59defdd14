"""Counts for Prometheus; docs/daemon.md lists them. None of them carries a text or a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.common.process.version import own_version
from outrider.edge_client.core.stats import RoundOutcome
from outrider.edge_client.session.session import SessionResult

PREFIX = "outrider_edge_"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 30)
_TPOT_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1)
_RTT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


@dataclass(frozen=True, slots=True)
class DaemonState:
    """Holds what the daemon is doing at the moment of a scrape."""

    model_name: str
    num_running: int
    num_waiting: int
    max_running: int
    num_idle_sequences: int
    num_idle_bytes: int
    is_verifier_reachable: bool | None  # None: in mode edge-only


class DaemonMetrics:
    """Holds the metrics of one daemon and of its process in a registry of their own."""

    def __init__(self, read_state: Callable[[], DaemonState]) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(_StateCollector(read_state))
        ProcessCollector(registry=registry)
        make = _Maker(registry)
        self.requests = make.counter("requests", "Requests answered.", "route", "status")
        self.finishes = make.counter("generations", "Generations by how they ended.", "mode", "finish")
        self.tokens = make.counter("tokens", "Tokens of texts, by origin.", "origin")
        self.rounds = make.counter("rounds", "Rounds, by how they ended.", "outcome")
        self.drafted = make.counter("draft_tokens", "Tokens of drafts, of trees all.", "method", "exact")
        self.accepted = make.counter("accepted_tokens", "Of these, accepted.", "method", "exact")
        about = "Tokens of chains, and of trees' likeliest paths, up to the first one rejected."
        self.judged = make.counter("judged_tokens", about, "method", "exact", "result")
        self.blocks = make.counter("gate_blocks", "Drafts a gate judged, by what was done.", "result")
        self.approximate = make.counter("approximate_tokens", "Tokens an approximate method let in.")
        self.fallbacks = make.counter("timeouts", "Rounds without an answer in time.")
        self.rebuilds = make.counter("rebuilds", "Sessions opened again.")
        self.num_bytes = make.counter("bytes", "Bytes of messages to and from the verifier.", "direction")
        self.prefix = make.counter("draft_prefix_tokens", "Prompt tokens the draft had, or read.", "result")
        self.ttft = make.histogram(
            "ttft_seconds", "From a request's arrival to the first token of its text.", _TTFT_S
        )
        self.tpot = make.histogram("tpot_seconds", "Mean time of a token after the first.", _TPOT_S)
        self.rtt = make.histogram("rtt_seconds", "A round's wait without the verifier's time.", _RTT_S)

    def answered(self, route: str, status: int) -> None:
        """Counts an answer."""
        self.requests.labels(route, str(status)).inc()

    def observe(
        self,
        result: SessionResult,
        mode: str,
        method: str | None,
        *,
        arrived_s: float,
        num_reused_tokens: int,
        num_read_tokens: int,
    ) -> None:
        """Counts a generation that has ended, whether complete or not. Its request arrived at `arrived_s`, by the clock
        of its tokens' times; of the prompt the draft had reused and read so many tokens."""
        stats = result.stats
        self.finishes.labels(mode, str(result.finish_reason)).inc()
        for origin in set(result.origins):
            self.tokens.labels(str(origin)).inc(result.origins.count(origin))
        exact = "yes" if result.method.is_exact else "no"
        for each in stats.rounds:
            if each.hard_ratio is not None:
                self.blocks.labels("kept" if each.outcome is RoundOutcome.KEPT else "sent").inc()
            if each.outcome is RoundOutcome.KEPT:
                continue
            self.rounds.labels(str(each.outcome)).inc()
            if each.is_answered and each.num_draft_tokens and method is not None:
                self.drafted.labels(method, exact).inc(each.num_draft_tokens)
                self.accepted.labels(method, exact).inc(each.num_accepted_tokens)
                for of, number in zip(("accepted", "rejected"), each.judged_tokens, strict=True):
                    self.judged.labels(method, exact, of).inc(number)
            if each.is_answered and each.rtt_ms:
                self.rtt.observe(max(0.0, each.net_ms) / 1e3)
        self.approximate.inc(sum(result.token_is_approximate))
        self.fallbacks.inc(stats.num_timeouts)
        self.rebuilds.inc(stats.num_rebuilds)
        self.num_bytes.labels("up").inc(stats.bytes_up)
        self.num_bytes.labels("down").inc(stats.bytes_down)
        self.prefix.labels("hit").inc(num_reused_tokens)
        self.prefix.labels("miss").inc(num_read_tokens)
        times = stats.token_times_ns
        if times:
            self.ttft.observe(max(0.0, times[0] / 1e9 - arrived_s))
        if len(times) > 1:
            self.tpot.observe((times[-1] - times[0]) / 1e9 / (len(times) - 1))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Maker:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, about, labels, registry=self._registry)

    def histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, about, registry=self._registry, buckets=buckets)


class _StateCollector(Collector):
    def __init__(self, read_state: Callable[[], DaemonState]) -> None:
        self._read_state = read_state

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._read_state()
        facts = {"version": own_version(), "model": state.model_name}
        yield InfoMetricFamily(PREFIX.rstrip("_"), "What this daemon is.", facts)
        gauges = (
            ("requests_running", "Requests generating.", state.num_running),
            ("requests_waiting", "Requests waiting for a turn.", state.num_waiting),
            ("requests_limit", "Requests generating at once at most.", state.max_running),
            ("draft_cache_texts", "Texts whose KV the draft keeps.", state.num_idle_sequences),
            ("draft_cache_bytes", "What that takes.", state.num_idle_bytes),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, about, value=value)
        if state.is_verifier_reachable is not None:
            about = "1 where the verifier answers; a scrape asks it."
            is_up = float(state.is_verifier_reachable)
            yield GaugeMetricFamily(PREFIX + "verifier_reachable", about, value=is_up)
