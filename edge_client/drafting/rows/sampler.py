"""Samples a drafted token from the graph's rows, with its probability and signals.

Without a support, scores and noise come from `sampling.processors`, over the whole vocabulary, so the sample
equals the verifier's wherever the distributions agree. With one it is an inverse CDF over integer weights.
The graph returns its softmax too, which saves most passes over the vocabulary here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from outrider.common.errors import ModelError
from outrider.common.grammar.state import state_of
from outrider.common.noise.draws import coupled_one, coupled_top, coupled_two, top_scores
from outrider.common.noise.philox import Purpose, first_word
from outrider.common.sampling.history import BadWords
from outrider.common.sampling.penalties import left_of
from outrider.common.sampling.processors import is_plain, process_logits
from outrider.common.sampling.support import certain, make_support, sample_support, support_prob
from outrider.common.types import DRAFT_SOURCE, RunnerUp, SamplingParams, Signals, Support
from outrider.edge_client.drafting.drawn_tree import Draw, make_draw
from outrider.edge_client.drafting.noise_ahead import NoiseAhead
from outrider.edge_client.drafting.rows.dropout import top_variance
from outrider.edge_client.drafting.rows.rows import Rows, allowed_by, constrained, finite
from outrider.edge_client.drafting.trees import MAX_CONTINUATIONS, Continuations
from outrider.kernels.signals import draft_signals

NOT_FINITE = "the draft's logits are not finite; its weights or its export are damaged"

_FEW = 512  # allowed ids; they are cheaper by themselves than as a part of all
MOST_GAP = 8.0  # nats below the first continuation; one that scores less is never worth a node

_CERTAIN = Signals(entropy_bits=0.0, nll=0.0, margin=1.0)  # of the only id that is allowed
# Token id, the probability it was sampled with, signals, and the support it was sampled from, if any.
Sampled = tuple[int, float, Signals, Support | None]


class DraftSampler:
    """Samples for one sequence, with the rows of a runner made for the same temperature."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], num_support: int = 0) -> None:
        self._grammar = None if params.grammar is None else state_of(params.grammar)
        self._params = params = replace(params, grammar=None)  # rows are constrained before anything else
        self._bad_words, self._ended_params = BadWords(params.bad_words), replace(params, bad_words=())
        self._eos_token_ids = eos_token_ids
        self._num_support = num_support
        self._noise = NoiseAhead(params.seed)
        self.keeps_runner_ups = False
        self.runner_up: RunnerUp | None = None  # of the token that was sampled last, where they are kept
        self._is_greedy = params.temperature == 0
        self._needs_history = not is_plain(params)
        is_unbiased = not self._needs_history and not params.logit_bias
        is_whole = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
        self._is_argmax = self._is_greedy and is_unbiased
        self._is_tempered = not self._is_greedy and is_unbiased and is_whole

    @property
    def _is_plain_row(self) -> bool:
        """Returns whether a token is chosen by its row and the noise alone."""
        is_plain = self._is_argmax or self._is_tempered
        return is_plain and not self._num_support and not self.keeps_runner_ups

    @property
    def has_plain_trees(self) -> bool:
        """Returns whether a tree is told by its rows, the temperature and the noise alone."""
        return self._is_plain_row and self._grammar is None

    @property
    def seed(self) -> int:
        """Returns the seed of the noise."""
        return self._params.seed

    @property
    def temperature(self) -> float:
        """Returns the temperature that it samples at."""
        return self._params.temperature

    @property
    def has_supports(self) -> bool:
        """Returns whether tokens are sampled from supports."""
        return self._num_support > 0

    @property
    def needs_history(self) -> bool:
        """Returns whether `sample` needs the sequence (penalties, bad words, minimum length, grammar)."""
        return self._needs_history or self._grammar is not None

    def begin_draft(self) -> None:
        """Gives the masks of the grammar, if there is one, the time of one more draft."""
        if self._grammar is not None:
            self._grammar.begin_round()
            self._grammar.begin_draft()

    def prepare(self, positions: Iterable[int], num_tokens: int) -> Iterator[None]:
        """Makes the noise of some positions ahead, where samples need it. Yields before each."""
        if self._is_greedy or self._num_support:
            return
        for position in positions:
            if position not in self._noise:
                yield
                self._noise.row(position, num_tokens)

    def sample(
        self,
        rows: Rows,
        start: int,
        offset: int = 0,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
    ) -> Sampled:
        """Samples the draft token at `offset` after `start` committed tokens.

        At temperature 0 its probability is 1. Raises `ModelError` where the logits are not finite, and
        `GrammarLimitError` where the draft ends because the grammar takes too much.
        """
        if self._grammar is not None:
            is_allowed, is_ended = self._allowed(rows, prompt_ids, output_ids)
            if self._is_plain_row and rows.candidates is None and np.count_nonzero(is_allowed) <= _FEW:
                return self._sample_few(rows, is_allowed.nonzero()[0], self._position(start, offset))
            rows = self._left(rows, is_allowed, is_ended)
        probs = rows.probs[0]
        top_id = int(probs.argmax())
        top_prob = float(probs[top_id])
        if not math.isfinite(top_prob):
            raise ModelError(NOT_FINITE)
        token_id, prob, support = self._choose(rows, start, offset, prompt_ids, output_ids)
        variance = None if rows.candidates is None else top_variance(rows.candidates)
        signals = Signals(*draft_signals(finite(rows), probs, token_id, top_id), variance)
        return token_id, prob, signals, support

    def continuations(
        self,
        rows: Rows,
        start: int,
        offset: int,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        *,
        has_signals: bool = False,
    ) -> Continuations:
        """Returns what scores highest at `offset` after `start` committed tokens, noise included, and on request the
        signals of each; the first is what `sample` returns.

        `rows` has one row. Raises what `sample` raises.
        """
        assert not self._num_support, "a tree is drafted with the noise that both sides share"
        if not math.isfinite(rows.probs[0, 0]):  # one logit that is not makes them all so
            raise ModelError(NOT_FINITE)
        rows = self._constrained(rows, prompt_ids, output_ids)
        scores = rows.logits if self._is_argmax else self._scores(rows, prompt_ids, output_ids)
        if self._is_greedy:
            ids, sums = top_scores(scores[0], MAX_CONTINUATIONS, MOST_GAP)
        else:
            noise = self._noise.row(self._position(start, offset), scores.shape[1])
            ids, sums = coupled_top(scores[0], noise, MAX_CONTINUATIONS, MOST_GAP)
        token_ids, gaps = tuple(ids.tolist()), tuple((sums[:1] - sums).tolist())
        return Continuations(
            token_ids, gaps, DRAFT_SOURCE, _signals_of(rows, token_ids) if has_signals else ()
        )

    def support(self, rows: Rows, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = ()) -> Support:
        """Returns what a tree's children are drawn from; at temperature 0 with the weights of temperature 1, by which
        the likeliest are taken. `rows` has one row. Raises what `sample` raises."""
        rows = self._constrained(rows, prompt_ids, output_ids)
        return make_support(self._scores(rows, prompt_ids, output_ids)[0], self._num_support)

    def make_draw(self, start: int) -> Draw:
        """Returns the draws of the children of a tree after `start` committed tokens."""
        return make_draw(self._params, start)

    def _choose(
        self, rows: Rows, start: int, offset: int, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> tuple[int, float, Support | None]:
        if self._is_greedy:
            scores = rows.logits if self._is_argmax else self._scores(rows, prompt_ids, output_ids)
            token_id = int(scores.argmax())
            if self.keeps_runner_ups:
                self.runner_up = _greedy_runner_up(scores[0], token_id)
            return token_id, 1.0, certain(token_id) if self._num_support else None
        scores = self._scores(rows, prompt_ids, output_ids)
        if self._num_support:
            support = make_support(scores[0], self._num_support)
            token_id = sample_support(support, first_word(self._params.seed, Purpose.DRAFT, start, offset))
            return token_id, support_prob(support, token_id), support
        noise = self._noise.row(self._position(start, offset), scores.shape[1])
        if self.keeps_runner_ups:
            token_id, second, gap = coupled_two(scores[0], noise)
            self.runner_up = RunnerUp(second, gap)
        else:
            token_id = coupled_one(scores[0], noise)
        if self._is_tempered:
            return token_id, float(rows.tempered_probs[0, token_id]), None
        return token_id, _softmax_at(scores[0], token_id), None

    def _position(self, start: int, offset: int) -> int:
        """Returns the position whose noise is wanted; a draft that begins drops the noise of those before."""
        if not offset:
            self._noise.drop_before(start)
        return start + offset

    def _constrained(self, rows: Rows, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Rows:
        """Returns what the grammar leaves of a row after `output_ids`; without one the row itself."""
        if self._grammar is None:
            return rows
        return self._left(rows, *self._allowed(rows, prompt_ids, output_ids))

    def _left(self, rows: Rows, is_allowed: NDArray[np.bool_], is_ended: bool) -> Rows:
        left = constrained(rows, is_allowed, self._params.temperature)
        return replace(left, is_ended=True) if is_ended else left

    def _allowed(
        self, rows: Rows, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> tuple[NDArray[np.bool_], bool]:
        """Returns which ids the grammar allows after `output_ids`, and whether the text ends as bad words leave none of
        them."""
        assert self._grammar is not None, "a constrained text"
        if not math.isfinite(rows.probs[0, 0]):  # one logit that is not makes them all so
            raise ModelError(NOT_FINITE)
        self._grammar.follow(output_ids)
        longest = self._bad_words.longest
        text = (*prompt_ids[-longest:], *output_ids[-longest:]) if longest else ()
        words, is_ended = left_of(self._grammar, self._bad_words, text)
        return allowed_by(words, rows.logits.shape[1]), is_ended

    def _sample_few(self, rows: Rows, ids: NDArray[np.intp], position: int) -> Sampled:
        """Samples among a few allowed ids, by the formulas of all: what is excluded has no part in any sum."""
        if len(ids) == 1:  # half the places of a schema's output
            return int(ids[0]), 1.0, _CERTAIN, None
        logits = rows.logits[0, ids]
        weights = np.exp(logits - logits.max())
        probs = weights / weights.sum()
        if self._is_greedy:
            chosen, prob = int(logits.argmax()), 1.0
        else:
            tempered = rows.tempered_logits[0, ids]
            sums = tempered.astype(np.float64) + self._noise.gumbel_at(position, ids)
            chosen = int(sums.argmax())
            prob = _softmax_at(tempered, chosen)
        signals = Signals(*draft_signals(logits, probs, chosen, int(probs.argmax())), None)
        return int(ids[chosen]), prob, signals, None

    def _scores(
        self, rows: Rows, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """[1, num_tokens], with every sampling parameter in them."""
        if self._is_tempered:  # what `process_logits` would return, and already there
            return rows.tempered_logits
        scores: NDArray[np.float32] = process_logits(
            np,
            rows.logits,
            self._ended_params if rows.is_ended else self._params,
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            eos_token_ids=self._eos_token_ids,
        )
        return scores


def _signals_of(rows: Rows, token_ids: Sequence[int]) -> tuple[Signals, ...]:
    """Returns the signals of several tokens after the same ones, without a variance, which the runs of a tree do not
    measure. `rows` has one row."""
    if not token_ids:
        return ()
    logits, probs, first = finite(rows), rows.probs[0], token_ids[0]
    entropy, nll, margin = draft_signals(logits, probs, first, int(probs.argmax()))
    nlls = (nll + float(logits[first] - logits[each]) for each in token_ids)
    return tuple(Signals(entropy, max(0.0, each), margin) for each in nlls)


def _softmax_at(scores: NDArray[np.float32], token_id: int) -> float:
    highest = scores.max()
    if highest == -math.inf:  # everything is masked, and the choice is id 0
        return 1.0
    return math.exp(float(scores[token_id] - highest)) / float(np.exp(scores - highest).sum())


def _greedy_runner_up(scores: NDArray[np.float32], token_id: int) -> RunnerUp:
    """`scores` [num_tokens] is written to and restored."""
    highest, scores[token_id] = scores[token_id], -math.inf
    second = int(scores.argmax())
    scores[token_id] = highest
    return RunnerUp(second, float(highest - scores[second]))
