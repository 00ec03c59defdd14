"""Many real edge sessions in one process, a thread each, for a while: `python -m benchmarks.reliability.edges`.

Everything but the models is the product's: `EdgeSession`, the link, its retries and reconnections. Draft and
target are synthetic, so that the processor's time goes to what is measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from outrider.common.errors import OutriderError
from outrider.common.process.logs import setup_logging
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.events import TokenEvent
from outrider.edge_client.session.factory import Edge
from outrider.edge_client.session.session import EdgeSession
from outrider.experiments.synthetic.draft import create_synthetic_edge
from outrider.experiments.synthetic.keyed import FIRST_TOKEN, NUM_TOKENS
from outrider.experiments.synthetic.pair import SyntheticPair

SESSIONS_A_PROCESS = 100
_END_GRACE_S = 20.0
NO_END = 1 << 19  # tokens: below the synthetic target's context


@dataclass
class EdgeLog:
    """Records one session: monotonic seconds of its token events, and for each verdict (when, how long its
    last sending took, tokens committed)."""

    start_s: float
    token_s: list[float] = field(default_factory=list)
    rounds: list[tuple[float, float, int]] = field(default_factory=list)
    num_refusals: int = 0
    num_rebuilds: int = 0
    num_unverified: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Describes the sessions of a run; they start spread over `ramp_s`."""

    num_sessions: int
    seconds: float
    ramp_s: float = 1.0
    prompt_tokens: int = 64
    think_ms: float = 0.0  # of each drafted token
    on_timeout: str = "wait"


def run_crowd(address: str, crowd: Crowd) -> list[EdgeLog]:
    """Runs the sessions in a few processes. Raises RuntimeError where one of them fails."""
    return CrowdProcesses(address, crowd).logs()


class CrowdProcesses:
    """Holds the processes of a crowd, which run from now on; `logs` waits for their end."""

    def __init__(self, address: str, crowd: Crowd) -> None:
        self._limit_s = crowd.seconds + crowd.ramp_s + 3 * _END_GRACE_S
        num_processes = -(-crowd.num_sessions // SESSIONS_A_PROCESS)
        self._processes = []
        for number in range(num_processes):
            share = len(range(number, crowd.num_sessions, num_processes))
            told = json.dumps(asdict(crowd) | {"num_sessions": share})
            command = [sys.executable, "-m", "benchmarks.reliability.edges", address, told, str(number)]
            self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))

    def logs(self) -> list[EdgeLog]:
        """Returns every session's log. Raises RuntimeError."""
        found = []
        for process in self._processes:
            try:
                output, _ = process.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a process of edges failed: {process.returncode}")
            found += [EdgeLog(**each) for each in json.loads(output)]
        return found


class _Member:
    """One session of the crowd, on a thread of its own."""

    def __init__(self, edge: Edge, crowd: Crowd, number: int, delay_s: float) -> None:
        self.log = EdgeLog(0.0)
        self._delay_s = delay_s
        prompt = [FIRST_TOKEN + (number * 7 + i) % NUM_TOKENS for i in range(crowd.prompt_tokens)]
        self.session: EdgeSession = edge.session(prompt, seed=number)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        time.sleep(self._delay_s)
        log, stats = self.log, self.session.result.stats
        log.start_s, num_rounds, num_tokens = time.monotonic(), 0, 0
        try:
            for event in self.session.generate():
                if not isinstance(event, TokenEvent):
                    continue
                now_s = time.monotonic()
                num_tokens += 1
                log.token_s.append(round(now_s, 4))
                log.num_unverified += not event.is_verified
                if len(stats.rounds) > num_rounds:
                    num_rounds = len(stats.rounds)
                    log.rounds.append((round(now_s, 4), round(stats.rounds[-1].rtt_ms / 1e3, 5), num_tokens))
                    num_tokens = 0
        except OutriderError as error:
            log.error = f"{type(error).__name__}: {error}"
        log.num_refusals, log.num_rebuilds = stats.num_refusals, stats.num_rebuilds


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Prints a thread's exception, but for that of gRPC's watching threads, which on a machine this busy begin
    after their channel was closed."""
    if not (failed.exc_type is ValueError and "Channel closed" in str(failed.exc_value)):
        threading.__excepthook__(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one process of a crowd, whose sessions it prints as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.edges", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("crowd", type=json.loads, help="fields of Crowd, as JSON")
    parser.add_argument("number", type=int, help="of this process: other prompts, other seeds")
    given = parser.parse_args(arguments)
    setup_logging("error")
    threading.excepthook = _report_thread
    crowd = Crowd(**given.crowd)
    # One that does not end says where its threads are, before it is killed.
    faulthandler.dump_traceback_later(crowd.ramp_s + crowd.seconds + 2.5 * _END_GRACE_S, exit=True)
    config = run_config(
        verifier=given.address,
        max_new_tokens=NO_END,
        on_timeout=crowd.on_timeout,
        ignore_eos=True,
        seed=given.number,
        mode="speculative",
        pipeline="off",
        num_speculative_tokens=4,
    )
    pair = SyntheticPair(draft_token_s=crowd.think_ms / 1e3)
    edge, chance = create_synthetic_edge(config, pair), random.Random(given.number)
    first = given.number * 10_000
    members = [
        _Member(edge, crowd, first + i, chance.uniform(0.0, crowd.ramp_s)) for i in range(crowd.num_sessions)
    ]
    threading.stack_size(512 * 1024)
    for member in members:
        member.thread.start()
    time.sleep(crowd.ramp_s + crowd.seconds)
    for member in members:
        member.session.cancel()
    end_s = time.monotonic() + _END_GRACE_S
    for member in members:
        member.thread.join(max(0.0, end_s - time.monotonic()))
        member.log.error = member.log.error or ("hung" if member.thread.is_alive() else "")
    print(json.dumps([asdict(member.log) for member in members]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
