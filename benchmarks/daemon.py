"""The daemon against `edge-client run`: `make bench-daemon` → benchmarks/results/daemon.json.

One verifier, one daemon, two links (loopback, and one of 12 ms through the proxy). The two sides take turns:
`run --json` says itself when its first token was there, counted from the start of its generation, so without
starting Python or loading the draft; of the daemon we take what a client sees, from its request to the first
event of the stream, HTTP and tokenising included. Differences are medians of pairs, with `run` against
itself (A/A) from the same loop.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.results_file import write_results
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profiles import named_profile
from outrider.experiments.shared.processes import VerifierProcess, run_edge, running_verifier, start_server
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import Measure, at_least, at_most, judged

LINKS = ("loopback", "metro")
NUM_TOKENS = 96
MAX_TTFT_MS = 10.0


@dataclass(frozen=True, slots=True)
class _Seen:
    ttft_ms: float
    tokens_per_s: float
    text: str
    own_ttft_ms: float = 0.0  # by the daemon's own count, from the start of its generation


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.daemon", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs a link (default 20)")
    parser.add_argument("--quick", action="store_true", help="4 pairs: does it run?")
    options = parser.parse_args(arguments)
    num_pairs = 4 if options.quick else options.pairs
    measures: list[Measure] = []
    details: dict[str, Any] = {"num_pairs": num_pairs, "num_tokens": NUM_TOKENS, "links": {}}
    with running_verifier() as verifier:
        for name in LINKS:
            with create_realisation("proxy").open(named_profile(name), verifier.address) as link:
                found = _measure(link.address, num_pairs)
                details["links"][name] = {**found, "facts": link.facts()}
                measures += _judge(name, found)
    write_results("daemon", measures, details)
    return 0


def _measure(verifier: str, num_pairs: int) -> dict[str, Any]:
    prompts = [prompt.text for prompt in load_prompts()]
    runs: list[_Seen] = []
    again: list[_Seen] = []
    daemons: list[_Seen] = []
    with _daemon(verifier) as daemon:
        for number in range(-1, num_pairs):  # the first one warms up
            prompt, seed = prompts[number % len(prompts)], 100 + number
            _ask(daemon.address, prompt, seed)  # so that the verifier knows the prompt in every turn
            turn = (
                _run(verifier, prompt, seed),
                _ask(daemon.address, prompt, seed),
                _run(verifier, prompt, seed),
            )
            if number >= 0:
                for seen, kept in zip(turn, (runs, daemons, again), strict=True):
                    kept.append(seen)
    assert [each.text for each in runs] == [each.text for each in daemons], "the same seed, another text"
    return {
        "run_ttft_ms": [each.ttft_ms for each in runs],
        "run_again_ttft_ms": [each.ttft_ms for each in again],
        "daemon_own_ttft_ms": [each.own_ttft_ms for each in daemons],
        "daemon_ttft_ms": [each.ttft_ms for each in daemons],
        "run_tokens_per_s": [each.tokens_per_s for each in runs],
        "run_again_tokens_per_s": [each.tokens_per_s for each in again],
        "daemon_tokens_per_s": [each.tokens_per_s for each in daemons],
    }


def _judge(name: str, found: dict[str, Any]) -> list[Measure]:
    def difference(one: str, other: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return float(statistics.median(mine - theirs for mine, theirs in pairs))

    def ratio(one: str, other: str) -> float:
        pairs = zip(found[one], found[other], strict=True)
        return float(statistics.median(mine / theirs for mine, theirs in pairs))

    later_ms = difference("daemon_ttft_ms", "run_ttft_ms")
    aa_ms = difference("run_again_ttft_ms", "run_ttft_ms")
    speed = ratio("daemon_tokens_per_s", "run_tokens_per_s")
    aa_speed = ratio("run_again_tokens_per_s", "run_tokens_per_s")
    return [
        judged(
            f"daemon.http_{name}",
            f"of the time to first token: request, turn, tokenising, answer, {name}",
            difference("daemon_ttft_ms", "daemon_own_ttft_ms"),
            "ms",
            at_most(MAX_TTFT_MS),
        ),
        judged(
            f"daemon.ttft_{name}",
            f"time to first token, daemon minus run, {name} (A/A {aa_ms:+.1f} ms)",
            later_ms,
            "ms",
            at_most(MAX_TTFT_MS),
        ),
        judged(
            f"daemon.speed_{name}",
            f"tokens/s after the first, daemon : run, {name} (A/A {aa_speed:.2f})",
            speed,
            "ratio",
            at_least(0.9),
        ),
    ]


@contextmanager
def _daemon(verifier: str) -> Iterator[VerifierProcess]:
    command = [sys.executable, "-m", "outrider.edge_client", "serve", "--listen", "127.0.0.1:0"]
    flags = ("--verifier", verifier, "--on-timeout", "wait", "--log-level", "error")
    daemon = start_server([*command, *flags])
    try:
        yield daemon
    finally:
        daemon.stop()


def _run(verifier: str, prompt: str, seed: int) -> _Seen:
    flags = ("--verifier", verifier, "--seed", str(seed), "--max-new-tokens", str(NUM_TOKENS))
    done = run_edge(["run", *flags, "--on-timeout", "wait", "--ignore-eos", "--json", prompt])
    if done.returncode:
        raise RuntimeError(done.stderr)
    told = json.loads(done.stdout)
    return _Seen(told["stats"]["ttft_ms"], told["stats"]["tokens_per_s"], told["text"])


def _ask(address: str, prompt: str, seed: int) -> _Seen:
    """Measures a request as a client sees it, over a connection of its own."""
    body = {"prompt": prompt, "seed": seed, "max_tokens": NUM_TOKENS, "stream": True}
    extras = {"stream_options": {"include_usage": True}, "outrider": {"ignore_eos": True, "tokens": True}}
    content = json.dumps({**body, **extras})
    connection = http.client.HTTPConnection(address, timeout=60)
    start_s = time.perf_counter()
    connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
    text = ""
    times_s: list[float] = []
    counts: list[int] = []
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk["usage"]:
            own_ttft_ms = chunk["usage"]["outrider"]["ttft_ms"]
            break
        text += chunk["choices"][0]["text"]
        if "outrider" in chunk:
            times_s.append(time.perf_counter())
            counts.append(len(chunk["outrider"]["tokens"]))
    connection.close()
    speed = sum(counts[1:]) / (times_s[-1] - times_s[0])
    return _Seen((times_s[0] - start_s) * 1e3, speed, text, own_ttft_ms)


if __name__ == "__main__":
    sys.exit(main())
