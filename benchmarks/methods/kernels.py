"""Measures verification on a CPU, at a large vocabulary, against one logsumexp."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import alternate, median_ratio, time_s
from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.noise.draws import Purpose, coupled_argmax
from outrider.common.noise.philox import first_word
from outrider.common.sampling.processors import shape
from outrider.common.sampling.support import make_support, sample_support, support_prob
from outrider.common.types import Draft, Method, MethodParams, SamplingParams

NUM_SESSIONS, NUM_DRAFTED, VOCAB_SIZE = 16, 4, 152_064
TEMPERATURE = 0.8
# A bulk of unlikely ids, and a head whose logits fall with the logarithm of their rank as a language model's
# do: at temperature 0.8 the bulk holds 1 % and the likeliest id 50 % or so. The draft is off by a normal.
BULK_SCALE, HEAD_SIZE, HEAD_TOP, HEAD_SLOPE = 2.5, 200, 18.0, 1.6
DRAFT_ERROR = 0.75
POSITION = 100  # where the drafts begin


@dataclass(frozen=True)
class _Drafted:
    """Holds one session's round, and what the edge would have sent by how its draft was sampled."""

    sampling: SamplingParams
    logits: NDArray[np.float32]  # [NUM_DRAFTED + 1, vocab], the target's
    drafts: dict[int, Draft]  # by `num_support`

    def verify(self, method: Method) -> Outcome:
        draft = self.drafts[num_support(method)]
        step_round = StepRound(self.sampling, POSITION, (), (), draft.token_ids)
        rows = HostRows(self.logits, step_round, (0,), self.logits.shape[1])
        round_input = RoundInput(
            rows=rows,
            draws=KeyedDraws(self.sampling.seed, POSITION),
            position=POSITION,
            draft_tokens=draft.token_ids,
            draft_probs=draft.draft_probs if sends_probs(method) else (),
            supports=draft.supports if sends_support(method) else (),
            stop_ids=frozenset({0}),
            method_params=MethodParams(),
        )
        return create_method(method).verify(round_input)


def measure_cpu_verify(num_turns: int = 15) -> dict[str, float]:
    """Verifies 16 rounds of 4 drafted tokens over 152,064 logits, through the methods, and compares with
    `torch.logsumexp` of the same [80, 152064] float32: milliseconds (medians), ratios within a turn, tokens
    accepted of drafted.

    `*_ratio` is a method's time over torch's; `numpy_ratio` the same of logsumexp in numpy; `aa` torch over
    torch. torch runs with its own number of threads, the methods as the engine runs them.
    """
    import torch

    logits, drafted = _make_rounds(VOCAB_SIZE)
    tensor = torch.from_numpy(logits)
    outcomes: dict[Method, list[Outcome]] = {}

    def verify(method: Method) -> None:
        outcomes[method] = [each.verify(method) for each in drafted]

    def logsumexp() -> Any:
        return torch.logsumexp(tensor, -1)

    runs: dict[str, Callable[[], object]] = {
        "logsumexp": logsumexp,
        "coupled": partial(verify, Method.COUPLED),
        "sparse": partial(verify, Method.SPARSE),
        "numpy": lambda: _logsumexp(logits),
        "again": logsumexp,
    }
    seconds = alternate({name: partial(time_s, run) for name, run in runs.items()}, num_turns)
    names = {"coupled": "coupled_ratio", "sparse": "sparse_ratio", "numpy": "numpy_ratio", "again": "aa"}
    figures = {f"{name}_ms": 1e3 * statistics.median(times) for name, times in seconds.items()}
    figures |= {label: median_ratio(seconds[name], seconds["logsumexp"]) for name, label in names.items()}
    for method, found in outcomes.items():
        accepted = sum(outcome.accepted_len for outcome in found)
        judged = sum(min(outcome.accepted_len + 1, NUM_DRAFTED) for outcome in found)
        figures[f"{method}_acceptance"] = accepted / judged
    return {name: round(value, 4) for name, value in figures.items()} | {"threads": torch.get_num_threads()}


def _make_rounds(vocab_size: int) -> tuple[NDArray[np.float32], list[_Drafted]]:
    rng = np.random.default_rng(2026)
    num_rows = NUM_DRAFTED + 1
    logits = rng.standard_normal((NUM_SESSIONS * num_rows, vocab_size), np.float32) * np.float32(BULK_SCALE)
    for row in logits:
        head = rng.choice(vocab_size, HEAD_SIZE, replace=False)
        row[head] = HEAD_TOP - HEAD_SLOPE * np.log1p(np.arange(HEAD_SIZE)) + rng.normal(size=HEAD_SIZE) / 2
    each = [logits[i * num_rows : (i + 1) * num_rows] for i in range(NUM_SESSIONS)]
    return logits, [_draft(rows, seed, rng) for seed, rows in enumerate(each)]


def _draft(logits: NDArray[np.float32], seed: int, rng: np.random.Generator) -> _Drafted:
    sampling = SamplingParams(temperature=TEMPERATURE, seed=seed)
    error = rng.standard_normal((NUM_DRAFTED, logits.shape[1]), np.float32) * np.float32(DRAFT_ERROR)
    scores = shape(np, logits[:NUM_DRAFTED] + error, sampling)
    drafts = {size: _sample_draft(scores, seed, size) for size in {num_support(method) for method in Method}}
    return _Drafted(sampling, logits, drafts)


def _sample_draft(scores: NDArray[np.float32], seed: int, size: int) -> Draft:
    """Samples a draft from `size` ids a position; 0: from all, with the noise both sides share."""
    if size == 0:
        tokens = tuple(coupled_argmax(scores, seed, range(POSITION, POSITION + NUM_DRAFTED)).tolist())
        probs = np.exp(scores - _logsumexp(scores)[:, None])
        return Draft(tokens, tuple(probs[np.arange(NUM_DRAFTED), tokens].tolist()))
    supports = tuple(make_support(row, size) for row in scores)
    words = [first_word(seed, Purpose.DRAFT, POSITION, offset) for offset in range(NUM_DRAFTED)]
    tokens = tuple(map(sample_support, supports, words))
    return Draft(tokens, tuple(map(support_prob, supports, tokens)), supports=supports)


def _logsumexp(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    top = scores.max(axis=1, keepdims=True)
    return np.asarray(top[:, 0] + np.log(np.exp(scores - top).sum(axis=1)))
