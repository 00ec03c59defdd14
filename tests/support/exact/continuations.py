"""Texts sampled through the product's own path: edge sampler, codec, verification method, codec, edge.

The models are tables, so that a text costs a millisecond: logits after the last token of the text. All
randomness comes from the session's seed, one a text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.verification.methods.base import Outcome, RoundInput, UniformDraws
from outrider.cloud_verifier.verification.methods.registry import create_method
from outrider.cloud_verifier.verification.rows import HostRows, KeyedDraws, StepRound
from outrider.common.codec import decode_request, decode_response, encode_request, encode_response
from outrider.common.methods import num_support, sends_probs, sends_support
from outrider.common.sampling.processors import process_logits
from outrider.common.sampling.support import choose_candidate
from outrider.common.tree import Tree, is_chain, supports_by_row
from outrider.common.types import (
    CorrectionKind,
    Draft,
    Method,
    MethodParams,
    SamplingParams,
    Support,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.edge_client.drafting.draw_chances import DrawChances
from outrider.edge_client.drafting.drawn_tree import DrawnTreeBuilder, make_draw
from outrider.edge_client.drafting.onnx.runner import Rows
from outrider.edge_client.drafting.rows.sampler import DraftSampler
from outrider.edge_client.drafting.trees import TreeBudget

PROMPT: TokenIds = (0,)
EOS: TokenIds = (2,)  # ends no text here, but a minimum length masks it
_SEED_STEP = 0x9E3779B97F4A7C15  # any two seeds differ in many bits

Text = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """Logits [vocab, vocab] float32 of target and draft, by the last token."""

    target: NDArray[np.float32]
    draft: NDArray[np.float32]

    @property
    def vocab_size(self) -> int:
        return len(self.target)


def make_tables(vocab_size: int, seed: int = 0, agreement: float = 0.7) -> Tables:
    rng = np.random.default_rng(seed)
    target, other = rng.standard_normal((2, vocab_size, vocab_size)) * 1.6
    draft = agreement * target + (1 - agreement) * other
    return Tables(target.astype(np.float32), draft.astype(np.float32))


@dataclass(frozen=True)
class Written:
    """One text, and the indices of its tokens that are corrections."""

    tokens: Text
    corrected: tuple[int, ...]


class Writer:
    """Writes texts of `num_tokens` tokens with one method, as an edge and a verifier would."""

    def __init__(
        self,
        method: Method,
        tables: Tables,
        sampling: SamplingParams,
        *,
        num_tokens: int = 5,
        num_draft_tokens: int = 3,
        make_draws: Callable[[int, int], UniformDraws] = KeyedDraws,
        support_size: int = 8,
        tree: TreeBudget | None = None,
    ) -> None:
        self._method, self._tables, self._sampling = method, tables, sampling
        self._num_tokens, self._num_draft_tokens = num_tokens, num_draft_tokens
        self._make_draws = make_draws
        self._num_support = num_support(method, support_size)
        self._implementation = create_method(method)
        self._tree, self._chances = tree, DrawChances()  # which learn from all texts
        self._draft_rows = functools.cache(self._make_draft_rows)

    def texts(self, count: int, first_seed: int = 1) -> Iterator[Written]:
        for index in range(first_seed, first_seed + count):
            yield self._write(dataclasses.replace(self._sampling, seed=index * _SEED_STEP % 2**64))

    def _write(self, sampling: SamplingParams) -> Written:
        sampler = DraftSampler(sampling, EOS, self._num_support)
        text: list[int] = []
        corrected: list[int] = []
        while len(text) < self._num_tokens:
            draft = self._propose(sampler, sampling, text)
            request = VerifyRequest(
                1,
                len(PROMPT) + len(text),
                0,
                draft_tokens=draft.token_ids,
                q_token_probs=draft.draft_probs if sends_probs(self._method) else (),
                q_support=draft.supports if sends_support(self._method) else (),
                parents=() if is_chain(draft.parents) else draft.parents,
            )
            verdict = self._verify(request, sampling, text)
            text += [request.draft_tokens[node] for node in verdict.accepted_indices]
            if draft.parents:
                self._chances.observe(draft, verdict.accepted_indices, verdict.correction)
            if verdict.candidates:
                verdict = self._choose(verdict, draft.supports[verdict.accepted_len], sampling, text)
            if verdict.correction_kind is CorrectionKind.CORRECTION:
                corrected.append(len(text))
            text.append(verdict.correction)
        return Written(tuple(text), tuple(corrected))

    def _propose(self, sampler: DraftSampler, sampling: SamplingParams, text: list[int]) -> Draft:
        start, depth = len(PROMPT) + len(text), self._num_tokens - len(text) - 1
        if self._tree is not None:
            budget = dataclasses.replace(self._tree, max_depth=min(self._tree.max_depth, depth))
            draw = make_draw(sampling, start)
            return DrawnTreeBuilder(draw, self._chances, budget).build(_Supports(self, sampler, text))
        drafted: list[tuple[int, float, Support | None]] = []
        output = list(text)
        for offset in range(min(self._num_draft_tokens, depth)):
            rows = self._draft_rows(output[-1] if output else PROMPT[-1])
            token_id, prob, _, support = sampler.sample(rows, start, offset, PROMPT, output)
            drafted.append((token_id, prob, support))
            output.append(token_id)
        ids, probs = tuple(each[0] for each in drafted), tuple(each[1] for each in drafted)
        return Draft(ids, probs, supports=tuple(each[2] for each in drafted if each[2] is not None))

    def support_after(self, sampler: DraftSampler, output: list[int]) -> Support:
        """What a node's children are drawn from."""
        return sampler.support(self._draft_rows(output[-1] if output else PROMPT[-1]), PROMPT, output)

    def _choose(
        self, verdict: Verdict, support: Support, sampling: SamplingParams, text: list[int]
    ) -> Verdict:
        position, num_seen = len(PROMPT) + len(text), 0
        while True:
            token_id = choose_candidate(support, verdict.candidates, sampling.seed, position, num_seen)
            if token_id is not None:
                kind = CorrectionKind.CORRECTION
                return dataclasses.replace(verdict, correction=token_id, correction_kind=kind)
            num_seen += len(verdict.candidates)
            request = VerifyRequest(1, position, 0, candidates_from=num_seen)
            verdict = self._verify(request, sampling, text)

    def _verify(self, request: VerifyRequest, sampling: SamplingParams, text: list[int]) -> Verdict:
        """What `outrider.cloud_verifier.engine.finish` does, between two trips over the wire."""
        message = encode_request(request)
        arrived = decode_request(type(message).FromString(message.SerializeToString()))
        assert isinstance(arrived, VerifyRequest)
        last = text[-1] if text else PROMPT[-1]
        tree, supports = None, arrived.q_support
        if arrived.parents:
            tree = Tree(arrived.parents)
            supports = supports_by_row(tree, supports)
        rows = HostRows(
            self._tables.target[[last, *arrived.draft_tokens]],
            StepRound(sampling, arrived.base_position, PROMPT, text, arrived.draft_tokens, tree, supports),
            EOS,
            self._tables.vocab_size,
        )
        outcome = self._implementation.verify(
            RoundInput(
                rows=rows,
                draws=self._make_draws(sampling.seed, arrived.base_position),
                position=arrived.base_position,
                draft_tokens=arrived.draft_tokens,
                draft_probs=arrived.q_token_probs,
                supports=supports,
                stop_ids=frozenset(),
                method_params=MethodParams(),
                candidates_from=arrived.candidates_from,
                tree=tree,
            )
        )
        answer = encode_response(_make_verdict(outcome))
        verdict = decode_response(type(answer).FromString(answer.SerializeToString()))
        assert isinstance(verdict, Verdict)
        return verdict

    def _make_draft_rows(self, last: int) -> Rows:
        logits = self._tables.draft[last][None]
        temperature = np.float32(self._sampling.temperature or 1)
        tempered = logits / temperature
        return Rows(logits, _softmax(logits), tempered, _softmax(tempered))


def target_probs(tables: Tables, sampling: SamplingParams, text: Text) -> NDArray[np.float64]:
    """p of the next token, by the processors alone."""
    last = text[-1] if text else PROMPT[-1]
    scores = process_logits(
        np, tables.target[[last]], sampling, prompt_ids=PROMPT, output_ids=text, eos_token_ids=EOS
    )
    return np.asarray(_softmax(scores[0].astype(np.float64)), np.float64)


def _softmax(scores: NDArray[Any]) -> NDArray[Any]:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


class _Supports:
    """The draft's distributions after a text and some paths."""

    num_runs = 0

    def __init__(self, writer: Writer, sampler: DraftSampler, text: list[int]) -> None:
        self._writer, self._sampler, self._text = writer, sampler, text

    def expand(self, paths: Sequence[TokenIds]) -> list[Support | None]:
        return [self._writer.support_after(self._sampler, [*self._text, *path]) for path in paths]


def _make_verdict(outcome: Outcome) -> Verdict:
    return Verdict(
        1,
        outcome.accepted_len,
        outcome.correction,
        outcome.correction_kind,
        position=0,
        hash=0,
        accepted_nodes=outcome.accepted_nodes,
        candidates=outcome.candidates,
    )
