"""Times of a real system for the simulator: `python -m experiments.simulator.measure --out FILE.json`.

Starts the embedded verifier and runs real edges against it over loopback, which has no delay of its own;
their drafts only take time (`experiments.simulator.replay`), so nothing competes for the verifier's cores.
The draft is timed by itself.

- a forward: a plane over sessions and tokens of the step, least squares over the rounds' own metrics
- an answer: what the verifier takes beyond queue and forward
- messages: what a round takes beyond the verifier, a quarter for each of the four ways through the software
- the edge: what lies between two rounds that is neither draft nor wait
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_client.config import RunConfig
from edge_client.drafting.onnx_model import OnnxDraftModel
from edge_client.link.grpc_link import GrpcLink
from edge_client.options import Mode
from edge_client.session import new_session_id
from edge_client.stats import RoundRecord
from experiments.decoding import EMBEDDED
from experiments.processes import running_verifier
from experiments.simulator.replay import GREEDY, KnownText, RealRequest, ReplayEdges, learn_texts
from experiments.simulator.times import (
    DEFAULT_TIMES,
    TIMES,
    DraftTimes,
    EdgeTimes,
    SystemTimes,
    VerifierTimes,
    save_times,
)
from experiments.sweep.machine import machine_facts

LENGTHS = (1, 2, 4, 8)  # drafted tokens a round
SESSIONS = (1, 2, 4)
NUM_TEXTS, NUM_POSITIONS, NUM_TOKENS = 4, 64, 48
THINK = DraftTimes(token_ms=3.0)  # of the drafts that only take time
VERIFIER_FLAGS = ("--log-level", "error")


@dataclass(slots=True)
class Rounds:
    """Rounds of one draft length and number of sessions."""

    num_draft_tokens: int
    requests: list[RealRequest] = field(default_factory=list)

    @property
    def records(self) -> list[RoundRecord]:
        """Ordinary ones: answered, and drafted to the full."""
        return [
            each
            for request in self.requests
            for each in request.result.stats.rounds[1:]
            if each.is_answered and each.num_draft_tokens == self.num_draft_tokens
        ]


def measure(address: str, texts: Sequence[KnownText], is_quick: bool = False) -> SystemTimes:
    edges = ReplayEdges(texts, THINK, RunConfig(max_new_tokens=NUM_TOKENS, on_timeout="wait"))
    edges.run(address, 1, len(texts))  # warms up
    found: list[Rounds] = []
    for _ in range(1 if is_quick else 3):
        for num_sessions in SESSIONS:
            for length in LENGTHS:
                each = 1 if num_sessions > 1 or is_quick else 2
                requests = edges.run(address, num_sessions, each, num_speculative_tokens=length)
                found.append(Rounds(length, requests))
    colocated = edges.run(address, 1, len(texts), mode=str(Mode.CO_LOCATED), num_speculative_tokens=4)
    alone = [each for each in found if len({id(r) for r in each.requests}) <= 2]
    records = [record for rounds in found for record in rounds.records]
    single = [record for rounds in alone for record in rounds.records if record.batch_size == 1]
    facts = machine_facts()
    return SystemTimes(
        verifier=_verifier_times(found, records, single),
        edge=_edge_times(address, single, [request for rounds in alone for request in rounds.requests]),
        draft=measure_draft(texts),
        cloud_draft=_cloud_draft(colocated),
        source=f"python -m experiments.simulator.measure on {facts['cpu']}, {facts['cores']} cores",
    )


def _verifier_times(
    found: Sequence[Rounds], records: Sequence[RoundRecord], single: Sequence[RoundRecord]
) -> VerifierTimes:
    shapes, forwards_ms = [], []
    for rounds in found:
        for record in rounds.records:
            shapes.append((1.0, record.batch_size, record.batch_size * (rounds.num_draft_tokens + 1)))
            forwards_ms.append(record.forward_ms)
    step_ms, session_ms, token_ms = _fit(shapes, forwards_ms)
    outside_ms = [r.verifier_ms - r.queue_ms - r.forward_ms for r in single]
    way_ms = _middle(r.net_ms for r in single) / 4
    return VerifierTimes(
        step_ms=step_ms,
        session_ms=session_ms,
        token_ms=token_ms,
        answer_ms=_middle(outside_ms),
        receive_ms=way_ms,
        send_ms=way_ms,
    )


def _edge_times(address: str, single: Sequence[RoundRecord], requests: Sequence[RealRequest]) -> EdgeTimes:
    way_ms = _middle(r.net_ms for r in single) / 4
    return EdgeTimes(
        connect_ms=_connect_ms(address), send_ms=way_ms, receive_ms=way_ms, commit_ms=_commit_ms(requests)
    )


def _commit_ms(requests: Iterable[RealRequest]) -> float:
    """A request's time from its first to its last token, less drafts and waits, a round."""
    found = []
    for request in requests:
        rounds = [each for each in request.result.stats.rounds if each.is_answered]
        spent_ms = 1e3 * (request.token_times_s[-1] - request.token_times_s[0])
        spent_ms -= sum(each.draft_ms + each.rtt_ms for each in rounds)
        found.append(spent_ms / len(rounds))
    return max(0.0, round(statistics.median(found), 4))


def _connect_ms(address: str, repeats: int = 10) -> float:
    found = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        connection = GrpcLink(address, new_session_id()).connect(10.0)
        found.append(1e3 * (time.perf_counter() - start_s))
        connection.close()
    return round(statistics.median(found), 4)


def _cloud_draft(requests: Sequence[RealRequest]) -> DraftTimes:
    """A draft made within a step, by the line through its lengths: the last of a text are shorter."""
    rounds = [each for r in requests for each in r.result.stats.rounds if each.num_draft_tokens]
    token_ms = _middle(each.draft_ms / each.num_draft_tokens for each in rounds)
    return DraftTimes(token_ms=token_ms)


def measure_draft(texts: Sequence[KnownText], repeats: int = 12) -> DraftTimes:
    """The embedded draft on an idle machine: reading a prompt, then drafts of several lengths."""
    shapes, drafts_ms, reads_ms = [], [], []
    with OnnxDraftModel.open(EMBEDDED / "draft") as model:
        for known in texts:
            sequence = model.sequence(GREEDY, num_prompt_tokens=len(known.prompt_ids))
            start_s = time.perf_counter()
            sequence.commit(known.prompt_ids)
            sequence.propose(1)
            reads_ms.append(1e3 * (time.perf_counter() - start_s) / len(known.prompt_ids))
            for number in range(repeats):
                length = LENGTHS[number % len(LENGTHS)]
                sequence.commit(known.new_ids[number : number + 1])
                start_s = time.perf_counter()
                sequence.propose(length)
                shapes.append((1.0, float(length)))
                drafts_ms.append(1e3 * (time.perf_counter() - start_s))
            sequence.close()
    call_ms, token_ms = _fit(shapes, drafts_ms)
    return DraftTimes(token_ms=token_ms, call_ms=call_ms, read_token_ms=_middle(reads_ms))


def _fit(shapes: Sequence[Sequence[float]], values_ms: Sequence[float]) -> list[float]:
    """Least squares over the medians of equal shapes; a coefficient below zero is noise, and is left out."""
    by_shape: dict[tuple[float, ...], list[float]] = {}
    for shape, value_ms in zip(shapes, values_ms, strict=True):
        by_shape.setdefault(tuple(shape), []).append(value_ms)
    keys = list(by_shape)
    weights = np.sqrt([len(by_shape[key]) for key in keys])
    medians = np.array([statistics.median(by_shape[key]) for key in keys])
    columns = list(range(len(keys[0])))
    found = [0.0] * len(columns)
    while columns:
        matrix = np.array([[key[column] for column in columns] for key in keys])
        solution, *_ = np.linalg.lstsq(matrix * weights[:, None], medians * weights, rcond=None)
        if min(solution) >= 0 or len(columns) == 1:
            for column, value in zip(columns, solution, strict=True):
                found[column] = round(max(0.0, float(value)), 4)
            break
        columns.pop(int(np.argmin(solution)))
    return found


def _middle(values_ms: Iterable[float]) -> float:
    return round(statistics.median(values_ms), 4)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.simulator.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=TIMES / f"{DEFAULT_TIMES}.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    with running_verifier(*VERIFIER_FLAGS) as verifier:
        texts = learn_texts(verifier.address, NUM_TEXTS, NUM_POSITIONS)
        times = measure(verifier.address, texts, arguments.quick)
    save_times(times, arguments.out)
    print(arguments.out.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    from experiments.command import run_command

    run_command("measure", main)
