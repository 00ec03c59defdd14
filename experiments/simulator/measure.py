"""Times of a real system for the simulator: `python -m outrider.experiments.simulator.measure --out FILE.json`.

Starts the embedded verifier and runs real edges against it over loopback, which has no delay of its own;
their drafts only take time (`outrider.experiments.simulator.replay`), so nothing competes for the verifier's cores.
The draft is timed by itself.

- a forward: a plane over sessions, tokens and nodes of the step, least squares over the rounds' own metrics
- an answer: what the verifier takes beyond queue and forward
- messages: what a round takes beyond the verifier, a quarter for each of the four ways through the software;
  and on the way to the engine, what an idle one takes to begin
- the edge: what is between two rounds and neither draft nor wait
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.core.stats import RoundRecord
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.trees import TreeBudget, TreeDraft
from outrider.edge_client.session.session import new_session_id
from outrider.edge_client.transport.link.grpc_link import GrpcLink
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.simulator.parts.drafts import KnownText
from outrider.experiments.simulator.parts.times import (
    DEFAULT_TIMES,
    TIMES,
    DraftTimes,
    EdgeTimes,
    PartT,
    SystemTimes,
    VerifierTimes,
    save_times,
)
from outrider.experiments.simulator.replay import GREEDY, RealRequest, ReplayEdges, learn_texts
from outrider.experiments.sweep.machine import machine_facts
from outrider.models import EMBEDDED

LENGTHS = (1, 2, 4, 8)  # drafted tokens a round
NODES = (16, 64)  # of trees
SESSIONS = (1, 2, 4)
NUM_TEXTS, NUM_POSITIONS, NUM_TOKENS = 4, 64, 48
THINK = DraftTimes(token_ms=3.0)  # of the drafts that only take time
VERIFIER_FLAGS = ("--log-level", "error")


@dataclass(slots=True)
class Rounds:
    """Rounds of one draft length and number of sessions, or of trees of so many nodes."""

    num_draft_tokens: int
    num_sessions: int
    requests: list[RealRequest]
    are_trees: bool = False

    @property
    def records(self) -> list[RoundRecord]:
        """Returns the ordinary rounds: answered, and drafted to the full."""
        return [
            each
            for request in self.requests
            for each in request.result.stats.rounds[1:]
            if each.is_answered and each.num_draft_tokens == self.num_draft_tokens
        ]


def collect(edges: ReplayEdges, address: str) -> list[Rounds]:
    """Runs one turn of every length with every number of sessions."""
    return [
        Rounds(length, num_sessions, edges.run(address, num_sessions, 1, num_speculative_tokens=length))
        for num_sessions in SESSIONS
        for length in LENGTHS
    ]


def collect_trees(edges: ReplayEdges, address: str) -> list[Rounds]:
    """Runs one turn of trees of every size, by one session: of others in its forwards a round does not know the
    size."""
    return [Rounds(nodes, 1, edges.run(address, 1, 1, tree=nodes), are_trees=True) for nodes in NODES]


def measure(address: str, texts: Sequence[KnownText], num_turns: int = 3) -> SystemTimes:
    """Measures every part of a system with the embedded pair."""
    rounds = run_config(max_new_tokens=NUM_TOKENS, on_timeout="wait", mode="speculative", pipeline="off")
    edges = ReplayEdges(texts, THINK, rounds)
    edges.run(address, 1, len(texts))  # warms up
    turns = [collect(edges, address) for _ in range(num_turns)]
    trees = [collect_trees(edges, address) for _ in range(num_turns)]
    colocated = edges.run(
        address, 1, len(texts), mode=str(ExecutionMode.CO_LOCATED), num_speculative_tokens=4
    )
    facts = machine_facts()
    return SystemTimes(
        verifier=middle([verifier_times(*each) for each in zip(turns, trees, strict=True)]),
        edge=middle([edge_times(turn, address) for turn in turns]),
        draft=_measure_draft(texts),
        cloud_draft=_cloud_draft(colocated),
        source=f"python -m outrider.experiments.simulator.measure on {facts['cpu']}, {facts['cores']} cores",
    )


def verifier_times(found: Sequence[Rounds], trees: Sequence[Rounds] = ()) -> VerifierTimes:
    """Fits the verifier's times to one turn. What answering a tree takes more than answering a chain counts for its
    nodes."""
    shapes, forwards_ms = [], []
    for rounds in found:
        for record in rounds.records:
            num_tokens = record.batch_size * (rounds.num_draft_tokens + 1)
            shapes.append((1.0, record.batch_size, num_tokens))
            forwards_ms.append(record.forward_ms)
    step_ms, session_ms, token_ms = fit(shapes, forwards_ms)
    single = _single(found)
    answer_ms = _mean(r.verifier_ms - r.queue_ms - r.forward_ms for r in single)
    node_ms = 0.0
    if trees:
        records = [each for rounds in trees for each in rounds.records]
        num_nodes = [each.num_draft_tokens for each in records]
        chain_ms = [step_ms + session_ms + (n + 1) * token_ms + answer_ms for n in num_nodes]
        more_ms = sum(r.verifier_ms - r.queue_ms for r in records) - sum(chain_ms)
        node_ms = round(max(0.0, more_ms / sum(num_nodes)), 4)
    # An idle engine still takes its time from a job's arrival to the forward.
    begin_ms, way_ms = _mean(r.queue_ms for r in single), _mean(r.net_ms for r in single) / 4
    return VerifierTimes(
        step_ms=step_ms,
        session_ms=session_ms,
        token_ms=token_ms,
        node_ms=node_ms,
        answer_ms=answer_ms,
        receive_ms=round(way_ms + begin_ms, 4),
        send_ms=round(way_ms, 4),
    )


def edge_times(found: Sequence[Rounds], address: str) -> EdgeTimes:
    """Returns the edge's times of one turn."""
    way_ms = round(_mean(r.net_ms for r in _single(found)) / 4, 4)
    alone = [request for rounds in found if rounds.num_sessions == 1 for request in rounds.requests]
    return EdgeTimes(
        connect_ms=_connect_ms(address), send_ms=way_ms, receive_ms=way_ms, commit_ms=_commit_ms(alone)
    )


def think_times(found: Sequence[Rounds]) -> DraftTimes:
    """Returns what drafts that only take time took indeed: sleeping ends late."""
    records = [record for rounds in found for record in rounds.records]
    late_ms = _mean(r.draft_ms - r.num_draft_tokens * THINK.token_ms for r in records)
    return DraftTimes(token_ms=THINK.token_ms, call_ms=max(0.0, late_ms))


def middle(turns: Sequence[PartT]) -> PartT:
    """Returns each number's median over the turns: a burst of other work changes one turn, not the
    times."""
    names = [each.name for each in dataclasses.fields(turns[0])]  # type: ignore[arg-type]
    found = {name: statistics.median(getattr(turn, name) for turn in turns) for name in names}
    return dataclasses.replace(turns[0], **found)  # type: ignore[type-var]


def _single(found: Sequence[Rounds]) -> list[RoundRecord]:
    return [record for rounds in found if rounds.num_sessions == 1 for record in rounds.records]


def _commit_ms(requests: Iterable[RealRequest]) -> float:
    found = []
    for request in requests:
        rounds = [each for each in request.result.stats.rounds if each.is_answered]
        spent_ms = 1e3 * (request.token_times_s[-1] - request.token_times_s[0])
        spent_ms -= sum(each.draft_ms + each.rtt_ms for each in rounds)
        found.append(spent_ms / len(rounds))
    return max(0.0, _mean(found))


def _connect_ms(address: str, repeats: int = 10) -> float:
    found = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        connection = GrpcLink(address, new_session_id()).connect(10.0)
        found.append(1e3 * (time.perf_counter() - start_s))
        connection.close()
    return round(statistics.median(found), 4)


def _cloud_draft(requests: Sequence[RealRequest]) -> DraftTimes:
    rounds = [each for r in requests for each in r.result.stats.rounds if each.num_draft_tokens]
    token_ms = _mean(each.draft_ms / each.num_draft_tokens for each in rounds)
    return DraftTimes(token_ms=token_ms)


def _measure_draft(texts: Sequence[KnownText], repeats: int = 12) -> DraftTimes:
    shapes, drafts_ms, reads_ms = [], [], []
    trees: list[tuple[TreeDraft, float]] = []
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
                start_s = time.perf_counter()
                draft = sequence.propose_tree(TreeBudget(NODES[number % len(NODES)], 12, 4), NodeValues())
                trees.append((draft, 1e3 * (time.perf_counter() - start_s)))
            sequence.close()
    call_ms, token_ms = fit(shapes, drafts_ms)
    return DraftTimes(
        token_ms=token_ms,
        call_ms=call_ms,
        tree_row_ms=_tree_row_ms(trees, call_ms, token_ms),
        read_token_ms=_mean(reads_ms),
    )


def _tree_row_ms(trees: Sequence[tuple[TreeDraft, float]], call_ms: float, token_ms: float) -> float:
    """Returns what a tree takes more than its runs, for each row beyond the first of a run."""
    num_rows = sum(any(each.token_ids for each in told) for draft, _ in trees for told in draft.continuations)
    num_runs = sum(draft.num_runs for draft, _ in trees)
    more_ms = sum(tree_ms - call_ms for _, tree_ms in trees) - num_runs * token_ms
    return round(max(0.0, more_ms / (num_rows - num_runs)), 4)


def fit(shapes: Sequence[Sequence[float]], values_ms: Sequence[float]) -> list[float]:
    """Fits by least squares; a coefficient below zero is noise, and is left out."""
    rows, values = np.array(shapes), np.array(values_ms)
    columns, found = list(range(rows.shape[1])), [0.0] * rows.shape[1]
    while columns:
        solution, *_ = np.linalg.lstsq(rows[:, columns], values, rcond=None)
        if min(solution) >= 0 or len(columns) == 1:
            for column, value in zip(columns, solution, strict=True):
                found[column] = round(max(0.0, float(value)), 4)
            break
        columns.pop(int(np.argmin(solution)))
    return found


def _mean(values_ms: Iterable[float]) -> float:
    """Returns the mean: means add up to the mean time per token, tails included."""
    return round(statistics.fmean(values_ms), 4)


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.experiments.simulator.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=TIMES / f"{DEFAULT_TIMES}.json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    with running_verifier(*VERIFIER_FLAGS) as verifier:
        texts = learn_texts(verifier.address, NUM_TEXTS, NUM_POSITIONS)
        times = measure(verifier.address, texts, 1 if arguments.quick else 3)
    save_times(times, arguments.out)
    print(arguments.out.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    from outrider.experiments.shared.command import run_command

    run_command("measure", main)
