"""Records what of a real draft would be accepted, at every position of texts of the bank's pairs (`make
pair-bank`), and what the pair's models take on this machine.

python -m benchmarks.controller.record_bank [--only embedded,prose] [--texts 6 --positions 400]

The target writes each text alone; then the draft proposes 64 tokens at every position of it, and as many
count as accepted as agree with the text. That is what `coupled` accepts, whose text is the target's own
whatever is drafted. Of the first token its runner-up is noted too: whether that is the text's, and the gap
between the two. Acceptance is the same on any machine; the times are this one's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.engine_texts import write_texts
from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.common.errors import UsageError
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    TRACES,
    TraceSet,
    save_traces,
    trace_text,
)
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.simulator.measure import draft_times, fit
from outrider.experiments.simulator.parts.times import DraftTimes, VerifierTimes
from outrider.training.bank.pairs import BANK, RUN, BankFolder, chosen

TEMPERATURES = (0.0, 0.7, 1.0)
NUM_TURNS = 20  # of each time; the fastest counts: what else the machine does can only slow one down
FORWARDS = tuple(itertools.product((1, 4), (1, 2, 3, 5, 9)))  # sequences, tokens that each feeds
NUM_BEFORE = 100  # tokens before these

Written = tuple[TokenIds, TokenIds]  # a prompt, and what the target wrote after it


def record(folder: BankFolder, num_texts: int, num_positions: int) -> Iterator[TraceSet]:
    """Records a set for each draft and temperature of one target. Raises `UsageError` where the target or a
    draft is not built."""
    if not folder.prompts.is_file():
        raise UsageError(f"{folder.work} has no {folder.prompts.name}: run `make pair-bank` first")
    tokenizer = EdgeTokenizer(folder.target_dir / "tokenizer.json")
    prompts = [tuple(tokenizer.encode(each.text)) for each in load_prompts(folder.prompts, num_texts)]
    # Texts with what is drafted past their ends, and the sequences that are timed.
    kv_tokens = max(num_texts, 4) * (max(map(len, prompts)) + num_positions + 2 * MAX_DEPTH + NUM_BEFORE)
    backend = load_target(str(folder.target_dir), kv_tokens=kv_tokens)
    written = {}
    for temperature in TEMPERATURES:
        samplings = samplings_at(temperature, num_texts)
        new = write_texts(backend, prompts, samplings, num_positions + MAX_DEPTH, num_together=num_texts)
        written[temperature] = list(zip(prompts, map(tuple, new), strict=True))
    turns = [verifier_times(backend) for _ in range(NUM_TURNS)]
    verifier = min(turns, key=lambda turn: turn.step_s(1, 1, 0) + turn.step_s(1, 5, 0))
    for draft in folder.target.drafts:
        with create_draft_model(draft.strategy, folder.draft_dir(draft)) as model:
            for temperature, texts in written.items():
                name = f"{folder.target.name}/{draft.name} T={temperature:g}"
                yield record_set(name, model, texts, temperature, num_positions, verifier)


def record_set(
    name: str,
    model: DraftModel,
    texts: Sequence[Written],
    temperature: float,
    num_positions: int,
    verifier: VerifierTimes,
) -> TraceSet:
    """Drafts at every position of the texts, and times the draft."""
    samplings = samplings_at(temperature, len(texts))
    traces = [
        trace_text(model, prompt_ids, new_ids, sampling, num_positions)
        for (prompt_ids, new_ids), sampling in zip(texts, samplings, strict=True)
    ]
    turns = [draft_times(model, texts[:1], samplings[0]) for _ in range(NUM_TURNS)]
    draft = min(turns, key=lambda turn: turn.call_ms + 4 * turn.token_ms)
    draft = replace(draft, read_token_ms=min(turn.read_token_ms for turn in turns))
    return TraceSet(name, "recorded", tuple(traces), times=_times(verifier, draft))


def samplings_at(temperature: float, num_texts: int) -> list[SamplingParams]:
    """Returns how each text is sampled: texts have noise of their own."""
    return [SamplingParams(temperature=temperature, seed=number + 1) for number in range(num_texts)]


def verifier_times(backend: TargetBackend) -> VerifierTimes:
    """Times forwards of several sequences and tokens, once each."""
    sequences = [backend.new_sequence() for _ in range(max(count for count, _ in FORWARDS))]
    for sequence in sequences:
        backend.forward([ForwardItem(sequence, [1] * NUM_BEFORE, 0)])
    shapes, forwards_ms = [], []
    for count, num_fed in FORWARDS:
        items = [ForwardItem(sequence, [1] * num_fed, num_fed) for sequence in sequences[:count]]
        start_s = time.perf_counter()
        backend.forward(items)
        forwards_ms.append(1e3 * (time.perf_counter() - start_s))
        shapes.append((1.0, float(count), float(count * num_fed)))
        for sequence in sequences[:count]:
            backend.truncate(sequence, NUM_BEFORE)
    for sequence in sequences:
        backend.close(sequence)
    step_ms, session_ms, token_ms = fit(shapes, forwards_ms)
    return VerifierTimes(step_ms=step_ms, session_ms=session_ms, token_ms=token_ms)


def _times(verifier: VerifierTimes, draft: DraftTimes) -> dict[str, Any]:
    """Returns what differs by pair; messages and the edge's own times do not."""
    parts = {"verifier": asdict(verifier), "draft": asdict(draft)}
    return {part: {key: value for key, value in each.items() if value} for part, each in parts.items()}


def show(traces: TraceSet) -> str:
    """Returns a row of the table."""
    times = traces.times or {}
    verifier, draft = VerifierTimes(**times["verifier"]), DraftTimes(**times["draft"])
    return (
        f"| {traces.name} | {traces.acceptance_rate:.3f} | {traces.coverage:.2f} | {traces.mean_run(8):.2f} "
        f"| {1e3 * verifier.step_s(1, 1, 0):.1f} | {verifier.token_ms:.2f} | {draft.token_ms:.2f} "
        f"| {draft.read_token_ms:.3f} |"
    )


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.record_bank", description=__doc__)
    parser.add_argument("--bank", type=Path, default=RUN, metavar="DIR", help="what `make pair-bank` built")
    parser.add_argument("--only", metavar="NAMES", help=", ".join(target.name for target in BANK))
    parser.add_argument("--out", type=Path, default=TRACES, metavar="DIR", help="a file a target")
    parser.add_argument("--texts", type=int, default=6, metavar="N", help="prompts to write a text after")
    parser.add_argument("--positions", type=int, default=400, metavar="N", help="positions of each text")
    arguments = parser.parse_args()
    for target in chosen(arguments.only):
        sets = []
        for traces in record(BankFolder(arguments.bank, target), arguments.texts, arguments.positions):
            print(show(traces), flush=True)
            sets.append(traces)
        path = arguments.out / f"bank-{target.name}.npz"
        save_traces(path, sets)
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    run_command("record_bank", main)
