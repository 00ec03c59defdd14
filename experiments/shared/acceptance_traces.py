"""Acceptance traces: at every position of some texts, how many tokens of a draft made there would be accepted.

Under `coupled` a text does not depend on how it was drafted, so one trace replays every depth policy: a round
at position t that drafts n tokens commits min(n, run of t) of them and one more. The place of the text's token among
the draft's continuations, with the gaps between these, replays every tree. Recorded traces are a real pair's;
synthetic ones are drawn from stated probabilities and labelled so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import UsageError
from outrider.common.sequences import common_prefix
from outrider.common.types import Draft, SamplingParams, Signals, TokenIds
from outrider.edge_client.drafting.base import (
    DraftModel,
    DraftSequence,
    KeepsRunnerUps,
    ProposesAlong,
    ProposesTrees,
)
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, TreeBudget

MAX_DEPTH = 64  # tokens of the draft known at every position
TRACES = Path(__file__).resolve().parent / "traces"
RECORDED = TRACES / "embedded.npz"
_LEVELS = 63  # confidences are stored in steps of 1/63
_GAP_LEVELS = 25.5  # steps of a nat, up to ten nats
_NO_GAP = 255  # stored where a draft has fewer continuations
NO_RANK = 255  # the text's token is none of the draft's continuations
_MIN_CONFIDENCE = 1e-3
_QUIET = 0.0  # entropy and margin are not recorded


@dataclass(frozen=True, slots=True)
class TextTrace:
    """Holds one text's trace. The draft at position t is that after the text's first t + 1 new tokens."""

    runs: NDArray[np.uint8]  # [num_positions]: draft tokens that stand, MAX_DEPTH at most
    # [num_positions, MAX_DEPTH]: the draft's own, whether tokens stand or not; [num_positions, 0] of a draft
    # that has none, such as prompt lookup
    confidences: NDArray[np.float32]
    gaps: NDArray[np.float32] | None = None  # [num_positions]: of a draft's first token, to its runner-up
    seconds: NDArray[np.bool_] | None = None  # [num_positions]: whether that runner-up is the text's token
    lengths: NDArray[np.uint8] | None = None  # [num_positions]: tokens drafted there; None: MAX_DEPTH always
    ranks: NDArray[np.uint8] | None = (
        None  # [num_positions]: of the text's token among the continuations, or NO_RANK
    )
    # [num_positions, MAX_CONTINUATIONS]: nats that each continuation scores below the first; inf: there is none
    rank_gaps: NDArray[np.float32] | None = None
    # [places]: whether the draft proposed the target's choice in the place of each of the prompt's last tokens
    prompt: NDArray[np.bool_] | None = None

    @property
    def num_positions(self) -> int:
        """Returns the number of positions."""
        return len(self.runs)


PairTimes = Mapping[str, Mapping[str, float]]
"""Is what a verifier's and a draft's forwards take, by part and by name of the simulator's `times`."""


@dataclass(frozen=True, slots=True)
class TraceSet:
    """Holds the texts of one prompt set and one way to sample. `label` says recorded or synthetic.

    `times` are those of the pair on the machine that recorded it, as the simulator's `times` takes them.
    """

    name: str
    label: str
    texts: tuple[TextTrace, ...]
    alpha: float | None = None  # the chance of every token to stand, where that is one
    times: PairTimes | None = None

    @property
    def acceptance_rate(self) -> float:
        """Returns how often the first token of a draft is accepted, of drafts that have one."""
        runs = np.concatenate([text.runs for text in self.texts])
        return float(np.mean(runs[self.drafted_lengths > 0] > 0)) if self.coverage else 0.0

    @property
    def drafted_lengths(self) -> NDArray[np.uint8]:
        """Returns the tokens drafted at every position of all texts, [num_positions]."""
        full = [np.full(text.num_positions, MAX_DEPTH, np.uint8) for text in self.texts]
        own = [text.lengths for text in self.texts]
        return np.concatenate([each if of is None else of for each, of in zip(full, own, strict=True)])

    @property
    def coverage(self) -> float:
        """Returns how often the draft has a token to propose."""
        return float(np.mean(self.drafted_lengths > 0))

    def mean_run(self, num_draft_tokens: int) -> float:
        """Returns the mean number of accepted tokens of drafts of that length, empty ones included."""
        runs = np.concatenate([text.runs for text in self.texts])
        return float(np.minimum(runs, num_draft_tokens).mean())


@lru_cache(256)
def signals_of(confidence: float) -> Signals:
    """Returns the signals of a token with that confidence, as a draft would give them."""
    return Signals(_QUIET, -math.log(max(confidence, _MIN_CONFIDENCE)), _QUIET)


def trace_text(
    draft: DraftModel,
    prompt_ids: TokenIds,
    text: TokenIds,
    sampling: SamplingParams,
    num_positions: int,
    prompt_choices: TokenIds = (),
) -> TextTrace:
    """Drafts MAX_DEPTH tokens at every position of a text and counts those that agree with it.

    `text` is at least num_positions + MAX_DEPTH tokens that the target wrote with `sampling` after the prompt,
    `prompt_choices` what it would have written in the place of the prompt's last tokens (`Opened.prompt_choices`).
    """
    has_model = bool(draft.signal_names)  # else it copies
    runs, lengths = np.zeros(num_positions, np.uint8), np.zeros(num_positions, np.uint8)
    confidences = np.zeros((num_positions, MAX_DEPTH if has_model else 0), np.float32)
    gaps, seconds = np.zeros(num_positions, np.float32), np.zeros(num_positions, bool)
    sequence = draft.sequence(sampling, num_prompt_tokens=len(prompt_ids))
    has_runner_ups = isinstance(sequence, KeepsRunnerUps)
    if isinstance(sequence, KeepsRunnerUps):
        sequence.keep_runner_ups()
    sequence.commit((*prompt_ids, *text[:1]))
    position = 0
    while position < num_positions:
        actual = text[position + 1 :]
        drafted, num_more = _draft_on(sequence, actual, num_positions - position - 1 if has_model else 0)
        for offset in range(num_more + 1):
            own = slice(offset, offset + MAX_DEPTH)
            token_ids, place = drafted.token_ids[own], position + offset
            runs[place] = common_prefix(token_ids, actual[own])
            lengths[place] = len(token_ids)
            if has_model:
                nlls = [signals.nll for signals in drafted.signals[own]]
                confidences[place, : len(token_ids)] = np.exp(np.negative(nlls))
            if has_runner_ups:
                gaps[place] = drafted.runner_ups[offset].gap
                seconds[place] = drafted.runner_ups[offset].token_id == actual[offset]
        sequence.commit(actual[: num_more + 1])
        position += num_more + 1
    sequence.close()
    sequence = draft.sequence(sampling, num_prompt_tokens=len(prompt_ids))
    prompt = _in_prompt(sequence, prompt_ids, prompt_choices)
    has_ranks = has_model and isinstance(sequence, ProposesTrees)
    ranks, rank_gaps = _ranks(sequence, text, num_positions) if has_ranks else (None, None)
    sequence.close()
    return TextTrace(
        runs,
        confidences,
        gaps if has_runner_ups else None,
        seconds if has_runner_ups else None,
        None if lengths.min() == MAX_DEPTH else lengths,
        ranks,
        rank_gaps,
        prompt,
    )


def _in_prompt(sequence: DraftSequence, prompt_ids: TokenIds, choices: TokenIds) -> NDArray[np.bool_] | None:
    """Commits the prompt; returns where the draft would have proposed the `choices`, None where it cannot tell."""
    if not choices or not isinstance(sequence, ProposesAlong):
        sequence.commit(prompt_ids)
        return None
    start = len(prompt_ids) - len(choices)
    sequence.commit(prompt_ids[:start])
    told = sequence.propose_along(prompt_ids[start:])
    return np.array([own == its for own, its in zip(told, choices, strict=False)]) if told else None


def _ranks(
    sequence: DraftSequence, text: TokenIds, num_positions: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Returns the place of the text's token among the draft's continuations, and their gaps, at every position."""
    from outrider.edge_client.drafting.node_values import NodeValues

    assert isinstance(sequence, ProposesTrees), "asked before"
    ranks = np.full(num_positions, NO_RANK, np.uint8)
    gaps = np.full((num_positions, MAX_CONTINUATIONS), np.inf, np.float32)
    one_run, values = TreeBudget(MAX_CONTINUATIONS, 1, MAX_CONTINUATIONS), NodeValues()
    for position in range(num_positions):
        sequence.commit(text[position : position + 1])
        ((told,), *_) = sequence.propose_tree(one_run, values).continuations
        gaps[position, : len(told.gaps)] = told.gaps
        if text[position + 1] in told.token_ids:
            ranks[position] = told.token_ids.index(text[position + 1])
    return ranks, gaps


def _draft_on(sequence: DraftSequence, actual: TokenIds, num_wanted: int) -> tuple[Draft, int]:
    """Returns a draft of MAX_DEPTH tokens, lengthened by as many as serve `num_wanted` positions after this
    one, and how many these are: a model drafts on alike while what it drafted is the text."""
    first = sequence.propose(MAX_DEPTH)
    num_more = min(common_prefix(first.token_ids, actual), num_wanted)
    if not num_more:
        return first, 0
    position = sequence.position
    sequence.commit(first.token_ids)
    rest = sequence.propose(num_more)
    sequence.truncate(position)
    token_ids, signals = first.token_ids + rest.token_ids, first.signals + rest.signals
    probs, runner_ups = first.draft_probs + rest.draft_probs, first.runner_ups + rest.runner_ups
    return Draft(token_ids, probs, signals, runner_ups=runner_ups), num_more


def save_traces(path: Path, sets: Sequence[TraceSet]) -> None:
    """Writes the sets to an .npz file."""
    arrays: dict[str, NDArray[np.uint8]] = {}
    for number, traces in enumerate(sets):
        confidences = np.concatenate([text.confidences for text in traces.texts])
        arrays[f"runs{number}"] = np.concatenate([text.runs for text in traces.texts])
        arrays[f"confidences{number}"] = np.rint(confidences * _LEVELS).astype(np.uint8)
        if all(text.gaps is not None for text in traces.texts):
            gaps = np.concatenate([text.gaps for text in traces.texts if text.gaps is not None])
            arrays[f"gaps{number}"] = np.rint(gaps * _GAP_LEVELS).clip(0, 255).astype(np.uint8)
            seconds = [text.seconds for text in traces.texts if text.seconds is not None]
            arrays[f"seconds{number}"] = np.concatenate(seconds).astype(np.uint8)
        if any(text.lengths is not None for text in traces.texts):
            arrays[f"lengths{number}"] = traces.drafted_lengths
        if all(text.ranks is not None for text in traces.texts):
            arrays[f"ranks{number}"] = np.concatenate([t.ranks for t in traces.texts if t.ranks is not None])
            rank_gaps = np.concatenate([t.rank_gaps for t in traces.texts if t.rank_gaps is not None])
            steps = np.rint(np.minimum(rank_gaps * _GAP_LEVELS, _NO_GAP - 1))
            arrays[f"rank_gaps{number}"] = np.where(np.isinf(rank_gaps), _NO_GAP, steps).astype(np.uint8)
        arrays[f"prompts{number}"] = np.concatenate([_places(text) for text in traces.texts])
    header = [
        {
            "name": traces.name,
            "label": traces.label,
            "num_positions": [text.num_positions for text in traces.texts],
            "num_places": [len(_places(text)) for text in traces.texts],
            "times": traces.times,
        }
        for traces in sets
    ]
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def _places(text: TextTrace) -> NDArray[np.uint8]:
    return np.zeros(0, np.uint8) if text.prompt is None else text.prompt.astype(np.uint8)


def load_traces(path: Path = RECORDED, name: str | None = None) -> list[TraceSet]:
    """Returns the sets of a file, or those of one name. Raises `UsageError` for a file that holds no
    traces."""
    try:
        with np.load(path) as arrays:
            header = json.loads(arrays["header"].tobytes())
            wanted = [number for number, each in enumerate(header) if name in (None, each["name"])]
            return [_make_set(header[number], number, arrays) for number in wanted]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"--traces {path}: no acceptance traces: {error}") from error


def find_traces(name: str, folder: Path = TRACES) -> TraceSet:
    """Returns the recorded set of that name, of any file in the folder. Raises `UsageError` for an unknown
    one, naming those that there are."""
    paths = sorted(folder.glob("*.npz"))
    for path in paths:
        for traces in load_traces(path, name):
            return traces
    known = [traces.name for path in paths for traces in load_traces(path)]
    raise UsageError(f"no traces are called {name!r}; there are: {', '.join(known)}")


def synthetic_traces(
    alpha: float, confidence: str, num_texts: int = 16, num_positions: int = 256, seed: int = 1
) -> TraceSet:
    """Draws texts whose every drafted token is accepted with probability alpha. `confidence`: the draft
    gives "none", is "certain" of each token, or "knows": each token has a probability of its own, alpha on
    average."""
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(num_texts):
        shape = (num_positions, MAX_DEPTH)
        chances = np.full(shape, alpha)
        told = {"none": np.zeros((num_positions, 0)), "certain": np.ones(shape)}
        if confidence == "knows":
            told["knows"] = chances = random.beta(2 * alpha, 2 * (1 - alpha), shape)
        falls = np.append(random.random(shape) >= chances, np.ones((num_positions, 1), bool), axis=1)
        texts.append(TextTrace(falls.argmax(axis=1).astype(np.uint8), told[confidence].astype(np.float32)))
    known_alpha = None if confidence == "knows" else alpha
    return TraceSet(f"alpha {alpha:g}, confidence {confidence}", "synthetic", tuple(texts), known_alpha)


def _make_set(header: dict[str, object], number: int, arrays: Mapping[str, NDArray[np.uint8]]) -> TraceSet:
    num_positions = header["num_positions"]
    assert isinstance(num_positions, list)
    ends = np.cumsum(num_positions)
    confidences = (arrays[f"confidences{number}"] / _LEVELS).astype(np.float32)
    has_gaps = f"gaps{number}" in arrays
    gaps = (arrays[f"gaps{number}"] / _GAP_LEVELS).astype(np.float32) if has_gaps else None
    seconds = arrays[f"seconds{number}"].astype(bool) if has_gaps else None
    lengths = arrays[f"lengths{number}"] if f"lengths{number}" in arrays else None
    has_ranks = f"ranks{number}" in arrays
    ranks = arrays[f"ranks{number}"] if has_ranks else None
    rank_gaps = _rank_gaps(arrays[f"rank_gaps{number}"]) if has_ranks else None
    num_places = header.get("num_places") or [0] * len(num_positions)
    assert isinstance(num_places, list)
    prompts: list[NDArray[np.bool_] | None] = [None] * len(num_places)
    if any(num_places):
        found = np.split(arrays[f"prompts{number}"].astype(bool), np.cumsum(num_places)[:-1])
        prompts = [each if len(each) else None for each in found]
    runs = arrays[f"runs{number}"]
    texts = tuple(
        TextTrace(
            runs[each],
            confidences[each],
            gaps[each] if gaps is not None else None,
            seconds[each] if seconds is not None else None,
            lengths[each] if lengths is not None else None,
            ranks[each] if ranks is not None else None,
            rank_gaps[each] if rank_gaps is not None else None,
            prompts[text],
        )
        for text, each in enumerate(
            slice(end - size, end) for size, end in zip(num_positions, ends, strict=True)
        )
    )
    times = header.get("times")
    assert times is None or isinstance(times, dict)
    return TraceSet(str(header["name"]), str(header["label"]), texts, times=times)


def _rank_gaps(steps: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.where(steps == _NO_GAP, np.inf, steps / _GAP_LEVELS).astype(np.float32)
