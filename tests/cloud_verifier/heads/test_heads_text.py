"""Heads draft for co-located generation: they read the right states, and the text is cloud-only's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.heads import make_heads
from support.models import make_tiny_target
from torch import nn

from benchmarks.heads.service import CLOUD_ONLY, Case, Service
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.lookahead import Lookahead
from outrider.cloud_verifier.heads.sequence import Asked, Head, HeadFacts, HeadRun, HeadSequence
from outrider.common.types import (
    Method,
    SamplingParams,
    TokenIds,
)
from outrider.edge_client.drafting.rows.rows import Rows

NUM_LAYERS = 3
NUM_NEW = 24


class Target(NamedTuple):
    directory: Path
    decoder: str

    def load(self) -> PagedBackend:
        return load_target(self.directory, kv_bytes=64 << 20, decoder=self.decoder)


@pytest.fixture(scope="module", params=[("llama", "lean"), ("llama", "cuda"), ("gpt2", "transformers")])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    arch, decoder = request.param
    return Target(make_tiny_target(tmp_path_factory.mktemp("target"), arch), decoder)


class Truth:
    """Tells what the target makes of a text, by transformers itself."""

    def __init__(self, directory: Path, layers: Sequence[int] = (1, NUM_LAYERS)) -> None:
        """States are those after some layers; after the last one's the final norm is meant."""
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._states = [min(layer + 1, self._model.config.num_hidden_layers) for layer in layers]
        self.of = lru_cache(4096)(self._of)

    @torch.inference_mode()
    def _of(self, text: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [tokens, vocab] and states [tokens, layers · size]."""
        out = self._model(torch.tensor([text]), output_hidden_states=True)
        return out.logits[0], torch.cat([out.hidden_states[each][0] for each in self._states], dim=-1)


class KnowingSequence(HeadSequence):
    """Knows what the target says after each path, and checks every state that it is given."""

    _head: KnowingHead

    def read(self, features: FeatureLog) -> None:
        first, end = features.start, features.end
        super().read(features)
        self._seen = (first, end, self.features)

    def row(self, path: TokenIds) -> Rows:
        return self.rows(self._logits(path)[:, : self._num_tokens].numpy())

    def _logits(self, path: TokenIds) -> torch.Tensor:
        first, end, rows = self._seen
        logits, states = self._head.truth.of((*self._text, *path))
        is_whole = end == len(self._text) - 1 and len(rows) == end - first
        is_right = is_whole and torch.allclose(rows, states[first:end], rtol=1e-3, atol=1e-3)
        self._head.num_wrong += not is_right  # an exception would end the drafting alone
        self._head.num_checked += len(rows)
        return logits[-1:]


class KnowingRun(HeadRun):
    _sequences: Sequence[KnowingSequence]

    def roots(self) -> list[Rows]:
        return [each.row(()) for each in self._sequences]

    def after(self, asked: Sequence[Asked]) -> list[list[Rows]]:
        return [[self._sequences[number].row(path) for path in paths] for number, paths in asked]


class KnowingHead(Head):
    def __init__(self, backend: PagedBackend, truth: Truth, name: str, *, reads_all: bool) -> None:
        facts = HeadFacts(name, 4, (1, NUM_LAYERS), reads_all, "")
        super().__init__(backend, facts, nn.Module(), KnowingRun, KnowingSequence)
        self.truth, self.num_checked, self.num_wrong = truth, 0, 0


def make_prompt(seed: int, length: int) -> TokenIds:
    return tuple(np.random.default_rng(seed).integers(1, 400, length).tolist())


@pytest.mark.parametrize(
    ("target", "method"),
    [
        (("llama", "lean"), Method.COUPLED),
        pytest.param(("llama", "cuda"), Method.COUPLED, marks=pytest.mark.slow),
        pytest.param(("gpt2", "transformers"), Method.COUPLED, marks=pytest.mark.slow),
        pytest.param(("llama", "lean"), Method.SPARSE, marks=pytest.mark.slow),
        pytest.param(("llama", "cuda"), Method.SPARSE, marks=pytest.mark.slow),
        (("gpt2", "transformers"), Method.SPARSE),
    ],
    indirect=["target"],
)
def test_texts_beside_each_other_are_cloud_onlys(target: Target, tmp_path: Path, method: Method) -> None:
    backend = target.load()
    trained = [load_head(make_heads(tmp_path / kind, kind), backend) for kind in ("medusa", "hydra")]
    truth = Truth(target.directory)
    knowing = [
        KnowingHead(backend, truth, "last", reads_all=False),
        KnowingHead(backend, truth, "all", reads_all=True),
    ]
    service = Service(backend, [*trained, *knowing, Lookahead(backend)])
    drafted = {"medusa": (12, 2), "hydra": (12,), "last": (12, 4), "all": (12, 3), CLOUD_ONLY: (0,)}
    if method is Method.COUPLED:
        drafted["lookahead"] = (16, 3)
    sources = [(source, num_nodes) for source, sizes in drafted.items() for num_nodes in sizes]
    num_accepted = 0
    for temperature in (0.0, 0.8):
        cases = [
            Case(
                make_prompt(seed, 3 + 9 * seed),
                SamplingParams(temperature=temperature, seed=seed),
                source,
                num_nodes,
                num_nodes > 4,
                method,
            )
            for seed, (source, num_nodes) in enumerate(sources)
        ]
        texts = service.write(cases, NUM_NEW)
        num_accepted += sum(text.num_accepted for text in texts)
        assert all(len(text.token_ids) == NUM_NEW for text in texts)
        if method is Method.COUPLED or temperature == 0:
            for case, text in zip(cases, texts, strict=True):
                assert text.token_ids == cloud_only(service, case), case.source
    assert num_accepted > 4 * NUM_NEW, "what knows the target's choice was hardly ever accepted"
    assert all(head.num_checked > NUM_NEW and not head.num_wrong for head in knowing)


def test_states_are_right_after_an_eviction_and_a_cached_prefix(target: Target) -> None:
    truth, backend = Truth(target.directory), target.load()
    heads = [
        KnowingHead(backend, truth, "last", reads_all=False),
        KnowingHead(backend, truth, "all", reads_all=True),
    ]
    service = Service(backend, heads)
    for seed, source in enumerate(
        ("last", "all", "last", "all")
    ):  # the prompt's KV is cached from the first on
        case = Case(make_prompt(1, 40), SamplingParams(seed=seed), source, 8)
        (text,) = service.write([case], NUM_NEW, is_evicted=True)
        assert text.token_ids == cloud_only(service, case)
        assert text.num_accepted > NUM_NEW // 2
    assert not any(head.num_wrong for head in heads)


def test_a_stream_that_is_resumed_from_an_earlier_token_is_drafted_for(
    target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    truth, backend = Truth(target.directory), target.load()
    knowing = [
        KnowingHead(backend, truth, "last", reads_all=False),
        KnowingHead(backend, truth, "all", reads_all=True),
    ]
    trained = [load_head(make_heads(tmp_path / kind, kind), backend) for kind in ("medusa", "hydra")]
    service = Service(backend, [*knowing, *trained])
    for source in ("last", "all", "medusa", "hydra"):
        case = Case(make_prompt(2, 20), SamplingParams(seed=1), source, 8)
        first, resumed = service.write_resumed(case, NUM_NEW, num_again=12)
        assert first.token_ids == resumed.token_ids == cloud_only(service, case)
        if source in ("last", "all"):
            assert resumed.num_steps < first.num_steps and resumed.num_accepted
    assert not any(head.num_wrong for head in knowing) and not caplog.records, "a draft failed"


def cloud_only(service: Service, case: Case) -> list[int]:
    alone = replace(case, source=CLOUD_ONLY, method=Method.COUPLED)
    return service.write([alone], NUM_NEW)[0].token_ids


def test_features_follow_what_is_done_to_the_kv() -> None:
    rows = torch.arange(12.0)[:, None]
    log = FeatureLog(keeps_all=True)
    log.append(3, rows[3:8])
    log.append(8, rows[8:12])  # a tree of four nodes after eight tokens
    log.keep(8, [1, 3])
    assert (log.start, log.end, log.take()[:, 0].tolist()) == (3, 10, [3, 4, 5, 6, 7, 9, 11])
    log.append(10, rows[10:12])
    log.truncate(11)
    assert (log.start, log.end, log.take()[:, 0].tolist()) == (9, 11, [11, 10])
    log.append(5, rows[5:7])  # after a rollback: what was before is not known to be of this text
    assert (log.start, log.end, log.take()[:, 0].tolist()) == (5, 7, [5, 6])
    log.truncate(2)
    assert (log.start, log.end, log.take()) == (0, 0, None), (
        "no features are none that a head could begin with"
    )
    log.append(2, rows[2:4])
    log.forget()
    assert log.take() is None
