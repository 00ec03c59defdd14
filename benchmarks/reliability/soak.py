"""`rel.soak`: daemon and verifier under mixed requests, resets and clients that leave: what grows.

Files, threads and the memory of a request come and go with it, by more than a leak adds in half an hour. So the clients
pause for each sample, until every request is answered and a little longer. The growth is that of the median from the
first third of what is counted to the last, an hour. A server at rest holds some MiB more or less from one sample to the
next, so half an hour cannot tell 1 % from none: the long form takes an hour, and the growth is given with its standard
error.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.setup import QUIET, Settings
from benchmarks.results_file import Found
from outrider.experiments.links.base import OpenLink, create_realisation
from outrider.experiments.links.profile import LinkProfile
from outrider.experiments.shared.processes import VerifierProcess, running_verifier, start_server
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_most, judged

MODES = ("speculative", "auto", "cloud-only", "co-located")
POLICIES = ("wait", "first_token", "edge_only")
NUM_CLIENTS = 3
RESET_EVERY_S = 15.0
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
# Caches that are full within the warm-up: the verifier's KV and the daemon's of finished texts. The latter is small, as
# what it holds varies with the lengths of the last texts.
KV_MEMORY, DRAFT_CACHE_MB = "48MiB", "2"
# gRPC's own pool has a thread more whenever all were busy at once, and one less after a while: 4 or 5 of them here.
GRPC_POOL = "event_engine"
LONG_PROMPT_CHARS = 2_000
MAX_GROWTH = 1.0  # percent an hour
SETTLE_S = 6.0  # until servers have put away what a client left behind; an idle daemon frees memory after 2 s

Sample = dict[str, float]


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found so far, once a minute after the warm-up."""
    seconds, warmup_s, every_s = settings.pick((3600.0, 300.0, 15.0), (60.0, 15.0, 3.0), (14.0, 2.0, 0.5))
    samples: list[tuple[float, Sample]] = []
    with (
        running_verifier(*QUIET, "--kv-memory", KV_MEMORY) as verifier,
        create_realisation("proxy").open(LinkProfile("soak", rtt_ms=10), verifier.address) as link,
    ):
        daemon = start_server(_serve_command(link.address))
        servers = {"verifier": verifier, "daemon": daemon}
        clients = _Clients(daemon.address)
        try:
            clients.ask_long()
            begin_s, next_report_s = time.monotonic(), warmup_s + 60.0
            next_reset_s = RESET_EVERY_S / 2
            while (now_s := time.monotonic() - begin_s) < seconds:
                time.sleep(every_s)
                with clients.paused():
                    time.sleep(SETTLE_S)
                    samples.append((now_s, _sample(servers)))
                if now_s >= next_reset_s:
                    next_reset_s += RESET_EVERY_S
                    link.reset()
                if now_s >= next_report_s:
                    next_report_s += 60.0
                    settings.say(f"{dict(clients.ended)}; {samples[-1][1]}")
                    yield _found(settings, samples, warmup_s, clients, link, servers)
            clients.stop()
            settings.say(f"{dict(clients.ended)}; {samples[-1][1]}")
            yield _found(settings, samples, warmup_s, clients, link, servers)
        finally:
            clients.stop()  # after Ctrl-C too: their threads would go on without a daemon
            daemon.stop()


def _serve_command(verifier: str) -> list[str]:
    command = [sys.executable, "-m", "outrider.edge_client", "serve", "--listen", "127.0.0.1:0"]
    return [*command, "--verifier", verifier, "--log-level", "error", "--draft-cache-mb", DRAFT_CACHE_MB]


class _Clients:
    """Sends one request after the other in a few threads until `stop`; counts how they ended."""

    def __init__(self, address: str) -> None:
        self.ended: Counter[str] = Counter()
        self.errors: list[str] = []  # the last few, with what was asked
        self._address = address
        self._prompts = [prompt.text for prompt in load_prompts()]
        self._is_over, self._may_ask = threading.Event(), threading.Event()
        self._may_ask.set()
        self._turns = [threading.Lock() for _ in range(NUM_CLIENTS)]  # held while a request is under way
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def ask_long(self) -> None:
        """Sends a prompt that the verifier reads on its thread for long steps, where torch begins workers at the first
        such step and keeps them; among the clients' prompts one that is long enough may come late."""
        prompt = " ".join(self._prompts)[:LONG_PROMPT_CHARS]
        self._send({"prompt": prompt, "max_tokens": 4}, 1 << 30)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Waits for the requests under way; none is sent within."""
        self._may_ask.clear()
        try:
            with contextlib.ExitStack() as stack:
                for turn in self._turns:
                    stack.enter_context(turn)
                yield
        finally:
            self._may_ask.set()

    def stop(self) -> None:
        """Waits for the requests under way."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        chance = random.Random(number)
        while not self._is_over.is_set():
            self._may_ask.wait()
            try:
                with self._turns[number]:
                    self.ended[self._ask(chance)] += 1
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.ended[type(error).__name__] += 1
                time.sleep(0.2)

    def _ask(self, chance: random.Random) -> str:
        """Sends a request by chance, whose answer is read to its end, or left after a few events."""
        extras = {"mode": chance.choice(MODES), "on_timeout": chance.choice(POLICIES), "ignore_eos": True}
        body = {
            "prompt": chance.choice(self._prompts),
            "seed": chance.randrange(1 << 30),
            "max_tokens": chance.randint(4, 96),
            "temperature": chance.choice((0.0, 0.8)),
            "stream": chance.random() < 0.8,
            "outrider": extras,
        }
        return self._send(body, chance.randint(1, 10) if chance.random() < 0.2 else 1 << 30)

    def _send(self, body: dict[str, Any], num_read: int) -> str:
        """Returns how the answer ended; of its lines `num_read` are read at most."""
        connection = http.client.HTTPConnection(self._address, timeout=120)
        try:
            content = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), content)
            answer = connection.getresponse()
            for number, line in enumerate(answer):
                if number >= num_read:
                    return "left early"
                if b'"error":' in line:
                    self.errors = [
                        *self.errors[-9:],
                        f"{body.get('outrider')}: {line.decode(errors='replace')[:300]}",
                    ]
                    return "error event"
            return f"status {answer.status}"
        finally:
            connection.close()


def _sample(servers: dict[str, VerifierProcess]) -> Sample:
    found: Sample = {}
    for name, server in servers.items():
        of = Path(f"/proc/{server.process.pid}")
        found[f"{name} MiB"] = round(int((of / "statm").read_text().split()[1]) * PAGE_KIB / 1024, 2)
        found[f"{name} files"] = len(list((of / "fd").iterdir()))
        found[f"{name} threads"] = sum(
            count for thread, count in _thread_names(server).items() if thread != GRPC_POOL
        )
    return found


def _thread_names(server: VerifierProcess) -> dict[str, int]:
    """Returns how many threads of each name a server has now."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/comm")
    names: Counter[str] = Counter()
    for each in tasks:
        with contextlib.suppress(OSError):  # it has ended since
            names[each.read_text().strip()] += 1
    return dict(names)


def growth_percent(samples: Sequence[tuple[float, Sample]], name: str) -> float:
    """Returns the growth an hour, in percent."""
    first, last = _thirds(samples)
    before, after = (statistics.median(each[name] for _, each in part) for part in (first, last))
    hours = _hours_between(first, last)
    return 100.0 * (after / before - 1.0) / hours if hours else 0.0


def growth_error_percent(samples: Sequence[tuple[float, Sample]], name: str) -> float:
    """Returns the standard error of that growth, in percent an hour, as of samples that vary independently about their
    third's mean; a median's variance is pi / 2 of a mean's."""
    thirds = [[each[name] for _, each in part] for part in _thirds(samples)]
    if len(thirds[0]) < 2 or not (hours := _hours_between(*_thirds(samples))):
        return 0.0
    variance = math.pi / 2.0 * sum(statistics.variance(part) / len(part) for part in thirds)
    return 100.0 * math.sqrt(variance) / statistics.median(thirds[0]) / hours


def _thirds(samples: Sequence[tuple[float, Sample]]) -> tuple[Sequence[tuple[float, Sample]], ...]:
    """Returns the first third and the last."""
    third = max(1, len(samples) // 3)
    return samples[:third], samples[-third:]


def _hours_between(first: Sequence[tuple[float, Sample]], last: Sequence[tuple[float, Sample]]) -> float:
    return (statistics.fmean(t for t, _ in last) - statistics.fmean(t for t, _ in first)) / 3600.0


def _found(
    settings: Settings,
    samples: Sequence[tuple[float, Sample]],
    warmup_s: float,
    clients: _Clients,
    link: OpenLink,
    servers: dict[str, VerifierProcess],
) -> Found:
    counted = [(at_s, each) for at_s, each in samples if at_s >= warmup_s]
    growth = {name: round(growth_percent(counted, name), 2) for name in counted[0][1]}
    worst = max(growth, key=growth.__getitem__)
    error = growth_error_percent(counted, worst)
    text = (
        f"growth an hour of memory, files and threads but gRPC's, the worst ({worst}, standard error {error:.2f}), "
        f"{counted[-1][0] - warmup_s:.0f} s after a warm-up of {warmup_s:.0f} s and {clients.ended.total()} requests"
    )
    measure = (
        judged("rel.soak", text, growth[worst], "%", at_most(MAX_GROWTH))
        if settings.is_long
        else Measure("rel.soak", f"{text}; too short to judge", growth[worst], "%")
    )
    threads = {name: _thread_names(server) for name, server in servers.items()}
    ended = {"ended": dict(clients.ended), "errors": clients.errors}
    return [measure], {
        "growth": growth,
        **ended,
        "threads": threads,
        "link": link.facts(),
        "samples": samples,
    }
