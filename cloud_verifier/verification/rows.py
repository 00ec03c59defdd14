"""`TargetRows` over logits in host memory, and a round's uniform draws."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import NoiseKey, Resampling, TargetRows, UniformDraws
from outrider.cloud_verifier.verification.row_kernels import load_row_kernels
from outrider.common.errors import ModelError
from outrider.common.grammar.masks import mask_scores
from outrider.common.grammar.state import GrammarLimitError
from outrider.common.noise.draws import Purpose, uniform
from outrider.common.sampling.history import History
from outrider.common.sampling.penalties import MaskScores, Penalties, wire
from outrider.common.sampling.processors import apply_penalties, is_plain, penalties_of
from outrider.common.sampling.support import most_probable
from outrider.common.sampling.truncation import copy
from outrider.common.tree import Tree
from outrider.common.types import SamplingParams, Support, TokenIds

_UNCUT = 0, 1.0, 0.0  # top-k, top-p and min-p that are off
_NO_CHANGES = np.empty(0, np.int64), np.empty(0, np.float64)


class KeyedDraws(UniformDraws):
    """Draws the numbers of the rounds that start at one position, keyed by the session's seed."""

    def __init__(self, seed: int, start: int) -> None:
        self._seed, self._start = seed, start

    def accepts(self, probability: float, offset: int) -> bool:
        return uniform(self._seed, self._start, offset, Purpose.ACCEPT) < probability


@dataclass(slots=True)  # not frozen: see RoundMetrics
class StepRound:
    """Holds one session's part of a step: the sequence before its rows, and its draft's supports."""

    sampling: SamplingParams
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # committed tokens after the prompt
    draft_token_ids: TokenIds
    tree: Tree | None = None  # of the draft's tokens, where they are no chain
    supports: tuple[Support, ...] = ()
    # Gives that of prompt and output, where the session keeps it.
    history: Callable[[], History] | None = None
    # What may be asked for besides the above: a GPU computes it beforehand.
    resampling: Resampling = Resampling.NONE
    candidates: range = range(0)  # the indices of the samples that `Resampling.CANDIDATES` asks for
    num_logprobs: int = 0
    num_rows: int = field(init=False)  # of logits: one for each drafted token, and one for the bonus
    is_cut: bool = field(init=False, default=False)  # see `cut`
    # What it alone took the host before the forward, where its rows are computed on a device.
    host_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.num_rows = len(self.draft_token_ids) + 1

    def cut(self, num_rows: int) -> None:
        """Keeps the draft tokens that the first `num_rows` rows judge, at least one; rows after these are not read.

        The last token kept has no row of its own: where it is accepted nothing follows it. A bonus in its place would
        bias methods that judge by q, as what it costs to go on depends on this token.
        """
        assert 0 < num_rows < self.num_rows, f"{num_rows} rows of {self.num_rows} are no cut"
        self.draft_token_ids, self.supports = self.draft_token_ids[:num_rows], self.supports[:num_rows]
        self.tree = None if self.tree is None else Tree(self.tree.parents[:num_rows])
        self.is_cut = True

    @property
    def row_positions(self) -> Sequence[int]:
        """Returns the position of the token that each row is the distribution of; any for rows that are not read."""
        start = self.position
        if self.tree is None:
            return range(start, start + self.num_rows)
        positions = [start, *(start + depth + 1 for depth in self.tree.depths)]
        return positions + [start] * (self.num_rows - len(positions))

    def needed_ids(self, row: int) -> TokenIds:
        """Returns the ids whose p the methods read at a row: the drafted ones and their support."""
        if self.tree is None:
            drafted = self.draft_token_ids[row : row + 1]
        else:
            drafted = tuple(self.draft_token_ids[node] for node in self.tree.children(row - 1))
        return (*drafted, *self.supports[row].token_ids) if row < len(self.supports) else drafted


class RawLogprobs(NamedTuple):
    """Holds a row's log-softmax over the ids that exist at an id and at the most probable ones, descending."""

    logprob: float
    top_token_ids: TokenIds
    top_logprobs: tuple[float, ...]


class ProcessedRows(TargetRows, abc.ABC):
    """Implements `TargetRows` over raw logits. Methods raise ModelError where a row has NaN.

    p of a kept id is exp((logit - top) / temperature - log_sum), `top` the row's largest logit.
    """

    is_on_device = False  # computed there from the beginning on: `wait` before they are read

    def __init__(self, step_round: StepRound) -> None:
        self._round, self._sampling = step_round, step_round.sampling
        sampling = step_round.sampling
        self._is_greedy = sampling.temperature == 0
        self._temperature = wire(sampling.temperature)

    def log_probs(self, row: int, token_ids: Sequence[int]) -> list[float]:
        if self._is_certain(row):
            best = self.target_sample(row)
            return [0.0 if token_id == best else -math.inf for token_id in token_ids]
        top, log_sum = self._total(row)
        temperature, threshold = self._temperature, self._threshold(row)
        logits = self._logits_at(row, token_ids)  # few: numpy's calls would cost more than they do
        logs = [(logit - top) / temperature - log_sum for logit in logits]
        if threshold > -math.inf:
            least = np.float32(threshold)
            for index, logit in enumerate(logits):  # rounded twice, the quotient is float32's all the same
                if np.float32(logit / temperature) < least:
                    logs[index] = -math.inf
        return logs

    def entropy(self, row: int) -> float:
        return 0.0 if self._is_certain(row) else self._entropy(row)

    @property
    def judged(self) -> StepRound:
        """Returns the round, whose draft is cut where a grammar takes too much after some of its tokens. Raises
        `GrammarLimitError` where it does before any."""
        return self._round

    @abc.abstractmethod
    def target_sample(self, row: int) -> int:
        """Returns the target's token at a row."""

    @abc.abstractmethod
    def raw_logprobs(self, row: int, token_id: int, num_top: int) -> RawLogprobs:
        """Returns the log-probability of an id and of the `num_top` most probable ones, before processing."""

    @property
    def is_computed(self) -> bool:
        """Returns whether nobody has to wait for the rows."""
        return True

    def wait(self) -> None:  # what is computed when it is read is not waited for
        """Waits until the rows are computed. Raises what went wrong on the device."""

    def sample(self, row: int, key: NoiseKey, changed: Mapping[int, float] | None = None) -> int:
        if self._is_certain(row):
            return self._certain_sample(row, changed or {})
        token_id = self._sample(row, key, changed) if changed else -1
        return self._sample(row, key, {}) if token_id < 0 else token_id

    def _is_certain(self, row: int) -> bool:
        """Returns whether p is 1 at the target's sample: greedy, or bad words removed all but id 0."""
        return self._is_greedy or self._total(row)[0] == -math.inf

    def _certain_sample(self, row: int, changed: Mapping[int, float]) -> int:
        best = self.target_sample(row)
        weights = {best: 0.0} | dict(changed)
        most = max(weights.values())
        if most == -math.inf:
            return best
        return min(token_id for token_id, weight in weights.items() if weight == most)

    def _key(self, key: NoiseKey) -> NDArray[np.uint64]:
        return np.array((self._sampling.seed, key.purpose, key.position, key.index), np.uint64)

    @abc.abstractmethod
    def _logits_at(self, row: int, token_ids: Sequence[int]) -> list[float]: ...

    @abc.abstractmethod
    def _threshold(self, row: int) -> float:
        """Returns the lowest score that truncation keeps, -inf where nothing is cut."""

    @abc.abstractmethod
    def _total(self, row: int) -> tuple[float, float]:
        """Returns (top, log_sum)."""

    @abc.abstractmethod
    def _entropy(self, row: int) -> float: ...

    @abc.abstractmethod
    def _sample(self, row: int, key: NoiseKey, changed: Mapping[int, float]) -> int:
        """Returns a sample with changed weights, -1 where every weight is -inf."""


class HostRows(ProcessedRows):
    """Reads float32 logits [num_draft_tokens + 1, vocab_size] in host memory, which stay unchanged."""

    def __init__(
        self, logits: NDArray[np.float32], step_round: StepRound, eos_token_ids: TokenIds, num_tokens: int
    ) -> None:
        """Ids at or above `num_tokens` do not exist."""
        super().__init__(step_round)
        sampling = step_round.sampling
        self._raw = logits
        self._num_tokens = min(num_tokens, logits.shape[1])
        self._kernels = load_row_kernels()
        self._is_cut = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
        self._cuts = (sampling.top_k, wire(sampling.top_p), wire(sampling.min_p)) if self._is_cut else _UNCUT
        # Computed when a row is read: [target sample, top, log_sum, threshold], or the middle two, or the last.
        self._sampled: dict[int, list[float]] = {}
        self._totals: dict[int, tuple[float, float]] = {}
        self._thresholds: dict[int, float] = {}
        self._positions = step_round.row_positions
        self._eos_token_ids = eos_token_ids

    @property
    def judged(self) -> StepRound:
        _ = self._penalized_logits  # cuts it
        return self._round

    @cached_property
    def _penalized_logits(self) -> NDArray[np.float32]:
        """Computed when its round is finished: the time counts as that of the round's tenant."""
        scores: NDArray[np.float32] = penalize(
            np,
            self._raw,
            self._round,
            penalties_of_round(self._round),
            self._eos_token_ids,
            lambda _, scores, words: self._kernels.mask_scores(scores, words),
        )
        return scores

    def raw_logprobs(self, row: int, token_id: int, num_top: int) -> RawLogprobs:
        logits = self._raw[row, : self._num_tokens]
        log_total = sum(self._kernels.logsumexp(logits, 1.0, -math.inf))
        top_ids = most_probable(logits, num_top)
        top_logprobs = tuple((logits[top_ids].astype(np.float64) - log_total).tolist())
        return RawLogprobs(float(logits[token_id]) - log_total, tuple(top_ids.tolist()), top_logprobs)

    def target_sample(self, row: int) -> int:
        token_id, top, log_sum, _ = self._sampled.get(row) or self._sample_from(row)
        check_total(top, log_sum)
        return int(token_id)

    def _sample_from(self, row: int) -> list[float]:
        """Samples this row and, of a chain, those after it up to the first that differs from its draft, in one call.

        These are the rows that `coupled` reads.
        """
        each = self._round
        first, rows, drafted = row, self._penalized_logits, each.draft_token_ids
        if each.tree is not None:
            first, rows, drafted = 0, rows[row : row + 1], ()
        found = self._kernels.gumbel_argmax_draft(
            rows,
            self._num_tokens,
            first,
            self._temperature,
            *self._cuts,
            self._sampling.seed,
            self._positions[row] - first,
            np.array(drafted, np.int64),
        )
        self._sampled.update(enumerate(found.tolist(), row))
        return self._sampled[row]

    def _logits_at(self, row: int, token_ids: Sequence[int]) -> list[float]:
        item = self._penalized_logits.item
        return [item(row, token_id) for token_id in token_ids]

    def _threshold(self, row: int) -> float:
        if not self._is_cut:
            return -math.inf
        if (sampled := self._sampled.get(row)) is not None:
            return sampled[3]
        threshold = self._thresholds.get(row)
        if threshold is None:
            threshold = self._kernels.truncation_threshold(self._row(row), self._temperature, *self._cuts)
            self._thresholds[row] = threshold
        return threshold

    def _total(self, row: int) -> tuple[float, float]:
        if (sampled := self._sampled.get(row)) is not None:
            return check_total(sampled[1], sampled[2])
        total = self._totals.get(row)
        if total is None:
            total = self._kernels.logsumexp(self._row(row), self._temperature, self._threshold(row))
            self._totals[row] = total
        return check_total(*total)

    def _row(self, row: int) -> NDArray[np.float32]:
        penalized: NDArray[np.float32] = self._penalized_logits[row, : self._num_tokens]
        return penalized

    def _entropy(self, row: int) -> float:
        total = self._total(row)
        return self._kernels.entropy(self._row(row), self._temperature, self._threshold(row), *total)

    def _sample(self, row: int, key: NoiseKey, changed: Mapping[int, float]) -> int:
        ids, weights = _NO_CHANGES
        if changed:
            ids = np.fromiter(changed, np.int64, len(changed))
            weights = np.fromiter(changed.values(), np.float64, len(changed))
        total = self._total(row)
        logits, threshold = self._row(row), self._threshold(row)
        return self._kernels.sample(
            logits, self._temperature, threshold, self._key(key), *total, ids, weights
        )


class PathPenalties(NamedTuple):
    """Holds what changes some rows of a round: of a tree those of one path."""

    penalties: Penalties
    rows: Any = None  # int64, those of the path; None: all
    num_new: int = 0  # the last ones, which no earlier path had


def penalties_of_round(each: StepRound) -> list[PathPenalties]:
    """Returns what penalties, biases, bad words and a grammar change, as numpy arrays; a node of a tree is penalised by
    its own path. There is none where the scores are the logits.

    Cuts the round's draft where the grammar takes too much after a drafted token. Raises `GrammarLimitError` where it
    does before any.
    """
    if is_plain(each.sampling) and not each.sampling.logit_bias:
        return []

    def find(num_rows: int, draft_token_ids: TokenIds) -> Penalties:
        history = each.history and each.history()
        return penalties_of(
            each.sampling, num_rows, each.prompt_ids, each.output_ids, draft_token_ids, history
        )

    if each.tree is None or is_plain(each.sampling):  # at most biases, which know no path
        of_chain = find(each.num_rows, each.draft_token_ids)
        num_rows = each.num_rows if each.sampling.grammar is None else len(of_chain.allowed)
        if num_rows == each.num_rows:
            return [PathPenalties(of_chain)]
        each.cut(num_rows)
        return [PathPenalties(of_chain, np.arange(num_rows), num_rows)]
    found = [PathPenalties(find(1, ()), np.zeros(1, np.int64), 1)]
    num_found = 1
    for run in each.tree.runs:
        path = each.tree.path(run[-1])
        rows = np.array([0, *(node + 1 for node in path)], np.int64)
        with suppress(GrammarLimitError):  # of earlier rows, where their masks were not kept
            of_path = find(len(rows), tuple(each.draft_token_ids[node] for node in path))
            rows = rows if each.sampling.grammar is None else rows[: len(of_path.allowed)]
            num_new = len(rows) - 1 - (len(path) - len(run))
            if num_new > 0:
                found.append(PathPenalties(of_path, rows, num_new))
                num_found += num_new
        if num_found <= run[-1] + 1:
            each.cut(num_found)
            break
    return found


def penalize(
    xp: Any,
    raw: Any,
    each: StepRound,
    found: Sequence[PathPenalties],
    eos_token_ids: TokenIds,
    mask: MaskScores = mask_scores,
) -> Any:
    """Returns the scores [rows, vocab] of a round's logits after `found`, `penalties_of_round` in arrays of `xp`, which
    is numpy or torch. They may be `raw` itself."""

    def apply(rows: Any, of_path: PathPenalties) -> Any:
        return apply_penalties(
            xp,
            rows,
            each.sampling,
            prompt_ids=each.prompt_ids,
            output_ids=each.output_ids,
            draft_token_ids=each.draft_token_ids,
            eos_token_ids=eos_token_ids,
            found=of_path.penalties,
            mask=mask,
        )

    if not found:
        return raw
    if found[0].rows is None:
        return apply(raw, found[0])
    scores, stop = copy(xp, raw), 0
    for of_path in found:
        start, stop = stop, stop + of_path.num_new
        scores[start:stop] = apply(raw[of_path.rows], of_path)[-of_path.num_new :]
    return scores


def check_total(top: float, log_sum: float) -> tuple[float, float]:
    """Returns (top, log_sum); raises ModelError where the row has NaN."""
    if math.isnan(top):
        raise ModelError("the model's logits are not numbers (NaN)")
    return top, log_sum
