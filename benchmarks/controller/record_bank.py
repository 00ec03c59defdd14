"""Records what of a real draft would be accepted, at every position of texts of the bank's pairs (`make
pair-bank`), and what the pair's models take on this machine.

python -m benchmarks.controller.record_bank [--only embedded,prose] [--texts 4 --positions 400]
python -m benchmarks.controller.record_bank --times    # of what was recorded, on this machine
python -m benchmarks.controller.record_bank --acceptance # with the times that were recorded before
python -m benchmarks.controller.record_bank --embedded # the embedded pair, without times

The target writes each text alone; then the draft proposes 64 tokens at every position of it, and as many
count as accepted as agree with the text. That is what `coupled` accepts, whose text is the target's own
whatever is drafted. Of the first token its runner-up is noted too: whether that is the text's, and the gap
between the two; in how many of the prompt's last places the draft would have proposed what the target would have
written there; of draft models also the place of the text's token among the continuations that trees are made of.
Acceptance is the same on any machine; the times are this one's.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.engine_texts import Text, texts_after, write
from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.common.errors import UsageError
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.controller.settings import SETTINGS
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.acceptance_traces import (
    MAX_DEPTH,
    RECORDED,
    TRACES,
    PairTimes,
    TextTrace,
    TraceSet,
    load_traces,
    save_traces,
    trace_text,
)
from outrider.experiments.shared.command import run_command
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.simulator.measure import fit
from outrider.experiments.simulator.parts.times import DraftTimes, VerifierTimes
from outrider.models import EMBEDDED
from outrider.training.bank.pairs import BANK, RUN, BankDraft, BankFolder, chosen

TEMPERATURES = (0.0, 0.7, 1.0)
EMBEDDED_TEMPERATURES, EMBEDDED_TEXTS, EMBEDDED_POSITIONS = (0.8, 0.0), 16, 128
NUM_TURNS = 20  # of each time; the fastest counts: what else the machine does can only slow one down
FORWARDS = tuple(itertools.product((1, 4), (1, 2, 3, 5, 9)))  # sequences, tokens that each feeds
NUM_BEFORE = 100  # tokens before these
NUM_SEQUENCES = 4
LENGTHS = (1, 4, 16)  # drafted tokens

ShapeT = TypeVar("ShapeT")


def record(folder: BankFolder, num_texts: int, num_positions: int) -> Iterator[TraceSet]:
    """Records a set for each draft and temperature of one target. Raises `UsageError` where the target or a
    draft is not built."""
    prompts = read_prompts(folder, num_texts)
    # Texts with what is drafted past their ends, and the sequences that are timed.
    longest = max(map(len, prompts)) + num_positions + 2 * MAX_DEPTH + NUM_BEFORE
    backend = load_target(str(folder.target_dir), kv_tokens=max(num_texts, NUM_SEQUENCES) * longest)
    verifier = verifier_times(backend)
    written = {}
    for temperature in TEMPERATURES:
        samplings = samplings_at(temperature, num_texts)
        written[temperature] = _write(backend, prompts, samplings, num_positions + MAX_DEPTH)
    for draft in folder.target.drafts:
        with create_draft_model(draft.strategy, folder.draft_dir(draft)) as model:
            times = _times(verifier, draft_times(model, prompts[0]))
            for temperature, texts in written.items():
                traces = _trace(model, texts, num_positions)
                yield TraceSet(set_name(folder, draft, temperature), "recorded", traces, times=times)


def record_embedded() -> Iterator[TraceSet]:
    """Records the embedded pair after the embedded prompts, which the simulator replays by default."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    prompts = [tuple(tokenizer.encode(prompt.text)) for prompt in load_prompts(limit=EMBEDDED_TEXTS)]
    longest = max(map(len, prompts)) + EMBEDDED_POSITIONS + MAX_DEPTH
    backend = load_target(str(EMBEDDED / "target"), kv_tokens=2 * longest)
    num_new = EMBEDDED_POSITIONS + MAX_DEPTH
    with create_draft_model("model", EMBEDDED / "draft") as model:
        for temperature in EMBEDDED_TEMPERATURES:
            samplings = [SamplingParams(temperature=temperature, seed=1)] * len(prompts)
            texts = _write(backend, prompts, samplings, num_new)
            traces = _trace(model, texts, EMBEDDED_POSITIONS)
            yield TraceSet(f"embedded T={temperature:g}", "recorded", traces)


def _write(
    backend: PagedBackend,
    prompts: Sequence[TokenIds],
    samplings: Sequence[SamplingParams],
    num_new: int,
) -> list[Text]:
    """Writes one after the other: beside others a prompt comes in chunks, whose last may have fewer places."""
    texts = texts_after(prompts, samplings, num_new, SETTINGS.num_prompt_choices)
    write(backend, texts)
    return texts


def _trace(model: DraftModel, texts: Sequence[Text], num_positions: int) -> tuple[TextTrace, ...]:
    return tuple(
        trace_text(
            model,
            tuple(text.prompt),
            tuple(text.token_ids),
            text.sampling,
            num_positions,
            text.prompt_choices,
        )
        for text in texts
    )


def time_again(folder: BankFolder, sets: Sequence[TraceSet]) -> Iterator[TraceSet]:
    """Returns sets recorded before, with the times that their models take now."""
    known = {traces.name: traces for traces in sets}
    for draft, times in time_pairs(folder, folder.target.drafts):
        for temperature in TEMPERATURES:
            yield replace(known[set_name(folder, draft, temperature)], times=times)


def time_pairs(folder: BankFolder, drafts: Sequence[BankDraft]) -> Iterator[tuple[BankDraft, PairTimes]]:
    """Returns drafts of a target, and what each pair's models take now, as a set of traces has it."""
    (prompt,) = read_prompts(folder, 1)
    kv_tokens = NUM_SEQUENCES * (NUM_BEFORE + 2 * MAX_DEPTH)
    verifier = verifier_times(load_target(str(folder.target_dir), kv_tokens=kv_tokens))
    for draft in drafts:
        with create_draft_model(draft.strategy, folder.draft_dir(draft)) as model:
            yield draft, _times(verifier, draft_times(model, prompt))


def set_name(folder: BankFolder, draft: BankDraft, temperature: float) -> str:
    """Returns the name by which the simulator replays a set."""
    return f"{folder.target.name}/{draft.name} T={temperature:g}"


def read_prompts(folder: BankFolder, num_prompts: int) -> list[TokenIds]:
    """Returns prompts that no training has seen. Raises `UsageError` where the bank is not built."""
    if not folder.prompts.is_file():
        raise UsageError(f"{folder.work} has no {folder.prompts.name}: run `make pair-bank` first")
    tokenizer = EdgeTokenizer(folder.target_dir / "tokenizer.json")
    return [tuple(tokenizer.encode(each.text)) for each in load_prompts(folder.prompts, num_prompts)]


def samplings_at(temperature: float, num_texts: int) -> list[SamplingParams]:
    """Returns how each text is sampled: texts have noise of their own."""
    return [SamplingParams(temperature=temperature, seed=number + 1) for number in range(num_texts)]


def verifier_times(backend: TargetBackend) -> VerifierTimes:
    """Times forwards of several sequences and tokens."""
    sequences = [backend.new_sequence() for _ in range(NUM_SEQUENCES)]
    for sequence in sequences:
        backend.forward([ForwardItem(sequence, [1] * NUM_BEFORE, 0)])

    def forward(shape: tuple[int, int]) -> None:
        count, num_fed = shape
        backend.forward([ForwardItem(each, [1] * num_fed, num_fed) for each in sequences[:count]])
        for sequence in sequences[:count]:
            backend.truncate(sequence, NUM_BEFORE)

    fastest_ms = _fastest_ms(FORWARDS, forward)
    for sequence in sequences:
        backend.close(sequence)
    step_ms, session_ms, token_ms = fit([(1.0, count, count * fed) for count, fed in FORWARDS], fastest_ms)
    return VerifierTimes(step_ms=step_ms, session_ms=session_ms, token_ms=token_ms)


def draft_times(model: DraftModel, prompt_ids: TokenIds) -> DraftTimes:
    """Times drafts of several lengths, and reading a prompt."""
    # Equal tokens, of which prompt lookup always has a copy.
    sequence = model.sequence(SamplingParams(temperature=1.0, seed=1))
    sequence.commit([1] * NUM_BEFORE)
    call_ms, token_ms = fit(
        [(1.0, length) for length in LENGTHS], _fastest_ms(LENGTHS, lambda length: sequence.propose(length))
    )
    sequence.close()
    unread = [model.sequence(SamplingParams(temperature=1.0, seed=1)) for _ in range(NUM_TURNS)]

    def read(_: None) -> None:
        fresh = unread.pop()
        fresh.commit(prompt_ids)
        fresh.propose(1)

    (read_ms,) = _fastest_ms([None], read)
    read_token_ms = max(0.0, read_ms - call_ms - token_ms) / len(prompt_ids)
    return DraftTimes(token_ms=token_ms, call_ms=call_ms, read_token_ms=round(read_token_ms, 4))


def _fastest_ms(shapes: Sequence[ShapeT], run: Callable[[ShapeT], object]) -> list[float]:
    """Returns the shortest time of each shape, all taking turns."""
    turns = [[_once_ms(shape, run) for shape in shapes] for _ in range(NUM_TURNS)]
    return [min(each) for each in zip(*turns, strict=True)]


def _once_ms(shape: ShapeT, run: Callable[[ShapeT], object]) -> float:
    start_s = time.perf_counter()
    run(shape)
    return 1e3 * (time.perf_counter() - start_s)


def _times(verifier: VerifierTimes, draft: DraftTimes) -> PairTimes:
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
    parser.add_argument("--texts", type=int, default=4, metavar="N", help="prompts to write a text after")
    parser.add_argument("--positions", type=int, default=400, metavar="N", help="positions of each text")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--times", action="store_true", help="measure only the times, of what was recorded")
    part.add_argument("--acceptance", action="store_true", help="keep the times that were recorded before")
    parser.add_argument("--embedded", action="store_true", help="the embedded pair alone, without times")
    arguments = parser.parse_args()
    if arguments.embedded:
        save_traces(arguments.out / RECORDED.name, list(record_embedded()))
        return 0
    for target in chosen(arguments.only):
        sets, path = list[TraceSet](), arguments.out / f"bank-{target.name}.npz"
        folder = BankFolder(arguments.bank, target)
        known = {each.name: each.times for each in load_traces(path)} if arguments.acceptance else {}
        found = (
            time_again(folder, load_traces(path))
            if arguments.times
            else record(folder, arguments.texts, arguments.positions)
        )
        for each in found:
            traces = replace(each, times=known.get(each.name, each.times))
            print(show(traces), flush=True)
            sets.append(traces)
        save_traces(path, sets)
        print(f"{path}: {path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    run_command("record_bank", main)
