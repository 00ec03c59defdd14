"""Heads draft for co-located generation: they read the right states, and the text is cloud-only's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.models import make_tiny_target
from torch import nn

from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.colocated import CoLocatedDrafter
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.lookahead import Lookahead
from outrider.cloud_verifier.heads.sequence import Head, HeadFacts, HeadSequence
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.types import (
    GeneratedTokens,
    GenerateRequest,
    Method,
    Opened,
    OpenRequest,
    Origin,
    SamplingParams,
    SessionResponse,
    TokenIds,
)
from outrider.edge_client.drafting.rows.rows import Rows

HIDDEN, NUM_LAYERS = 128, 3
NUM_NEW = 24


@pytest.fixture(scope="module", params=["llama", "gpt2"])  # our own decoder, and transformers'
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), request.param)


def make_heads(directory: Path, kind: str, num_heads: int = 3, seed: int = 0) -> Path:
    """Writes random heads of the tiny targets."""
    chance = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance) * 0.1

    tensors = {}
    for k in range(num_heads):
        tensors[f"{k}.0.linear.weight"], tensors[f"{k}.0.linear.bias"] = (
            random(HIDDEN, HIDDEN),
            random(HIDDEN),
        )
        if kind == "hydra":
            tensors[f"{k}.inputs.weight"] = random(HIDDEN, (k + 2) * HIDDEN)
            tensors[f"{k}.inputs.bias"] = random(HIDDEN)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "outrider": {"kind": kind}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Truth:
    """Tells what the target makes of a text, by transformers itself."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.of = lru_cache(4096)(self._of)

    @torch.inference_mode()
    def _of(self, text: TokenIds) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits [tokens, vocab] and states [tokens, 2 sizes]: after layer 1 and after the final norm."""
        out = self._model(torch.tensor([text]), output_hidden_states=True)
        return out.logits[0], torch.cat((out.hidden_states[2][0], out.hidden_states[-1][0]), dim=-1)


class KnowingSequence(HeadSequence):
    """Knows what the target says after each path, and checks every state that it is given."""

    _head: KnowingHead

    def read(self, features: FeatureLog) -> None:
        first, end = features.start, features.end
        super().read(features)
        self._seen = (first, end, self._features)

    def _logits(self, path: TokenIds) -> torch.Tensor:
        first, end, rows = self._seen
        assert end == len(self._text) - 1 and len(rows) == end - first
        logits, states = self._head.truth.of((*self._text, *path))
        torch.testing.assert_close(rows, states[first:end], rtol=1e-3, atol=1e-3)
        self._head.num_checked += len(rows)
        return logits[-1:]

    def feed_root(self) -> Rows:
        return self._rows(self._logits(()))

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        for path in paths:
            yield self._rows(self._logits(path)), 1


class KnowingHead(Head):
    def __init__(self, backend: TransformersBackend, truth: Truth, name: str, *, reads_all: bool) -> None:
        facts = HeadFacts(name, 4, (1, NUM_LAYERS), reads_all, "")
        super().__init__(backend, facts, nn.Module(), KnowingSequence)
        self.truth, self.num_checked = truth, 0


class Service:
    """An engine with heads, whose sessions generate side by side."""

    def __init__(self, backend: TransformersBackend, heads: Sequence[Any]) -> None:
        drafter = CoLocatedDrafter(None, heads)
        self._model = make_model_info(backend, ServeConfig(max_tree_nodes=16), drafter)
        self.engine = Engine(backend, self._model, drafter=drafter, prefill_chunk_tokens=16)
        self.num_accepted = 0
        self._num_sessions = 0

    def texts(self, cases: Sequence[tuple[TokenIds, SamplingParams, str, int, Method]]) -> list[list[int]]:
        """Returns the text after each prompt, drafted for by a source with trees of so many nodes; of "" by none."""
        ids, openings = [], []
        for prompt, sampling, source, _, method in cases:
            self._num_sessions += 1
            ids.append(self._num_sessions.to_bytes(16, "big"))
            opening = OpenRequest(
                ids[-1], prompt, len(prompt), sampling, method, ignore_eos=True, draft_source=source
            )
            openings.append(self._submit(ids[-1], opening))
        self._settle()
        texts, streams = [], []
        for (_, _, source, num_nodes, _), session_id, replies in zip(cases, ids, openings, strict=True):
            opened = replies[-1]
            assert isinstance(opened, Opened), opened
            texts.append([opened.first_token])
            request = GenerateRequest(
                1,
                opened.position,
                opened.hash,
                NUM_NEW - 1,
                is_co_located=bool(source),
                num_speculative_tokens=num_nodes,
                is_tree=num_nodes > 4,
            )
            streams.append(self._submit(session_id, request))
        self._settle()
        for text, replies in zip(texts, streams, strict=True):
            for reply in replies:
                assert isinstance(reply, GeneratedTokens), reply
                text += reply.token_ids
                self.num_accepted += reply.origins.count(Origin.ACCEPTED)
        return texts

    def _submit(self, session_id: bytes, request: Any) -> list[SessionResponse]:
        replies: list[SessionResponse] = []
        self.engine.submit(Job(session_id, request, replies.append, 0, "default"))
        return replies

    def _settle(self) -> None:
        while self.engine.step():
            self.engine.check_integrity()


def make_prompt(seed: int, length: int) -> TokenIds:
    return tuple(np.random.default_rng(seed).integers(1, 400, length).tolist())


@pytest.mark.parametrize("method", [Method.COUPLED, Method.SPARSE])
def test_texts_beside_each_other_are_cloud_onlys(target: Path, tmp_path: Path, method: Method) -> None:
    backend = load_target(target, kv_bytes=64 << 20)
    medusa = load_head(make_heads(tmp_path / "medusa", "medusa"), backend)
    hydra = load_head(make_heads(tmp_path / "hydra", "hydra"), backend)
    truth = Truth(target)
    knowing = [
        KnowingHead(backend, truth, "last", reads_all=False),
        KnowingHead(backend, truth, "all", reads_all=True),
    ]
    service = Service(backend, [medusa, hydra, *knowing, Lookahead(backend)])
    drafted = {"medusa": (12, 2), "hydra": (12,), "last": (12, 4), "all": (12, 3), "": (0,)}
    if method is Method.COUPLED:
        drafted["lookahead"] = (16, 3)
    sources = [(source, num_nodes) for source, sizes in drafted.items() for num_nodes in sizes]
    for temperature in (0.0, 0.8):
        cases = [
            (
                make_prompt(i, 3 + 9 * i),
                SamplingParams(temperature=temperature, seed=i),
                source,
                num_nodes,
                method,
            )
            for i, (source, num_nodes) in enumerate(sources)
        ]
        alone = [
            Service(backend, []).texts([(prompt, sampling, "", 0, Method.COUPLED)])[0]
            for prompt, sampling, *_ in cases
        ]
        texts = service.texts(cases)
        assert all(len(text) == NUM_NEW for text in texts)
        if method is Method.COUPLED or temperature == 0:
            assert texts == alone
    assert service.num_accepted > 4 * NUM_NEW, "what knows the target's choice was hardly ever accepted"
    assert all(head.num_checked > NUM_NEW for head in knowing)


def test_states_are_right_after_eviction_and_a_cached_prefix(target: Path) -> None:
    truth = Truth(target)
    backend = load_target(target, kv_tokens=256)  # for about five of the eight sessions
    heads = [
        KnowingHead(backend, truth, "last", reads_all=False),
        KnowingHead(backend, truth, "all", reads_all=True),
    ]
    service = Service(backend, heads)
    prompt = make_prompt(1, 40)
    for turn in range(2):
        for source in ("last", "all"):
            cases = [
                (
                    prompt if i % 2 else make_prompt(10 + i, 30),
                    SamplingParams(seed=i),
                    source,
                    8,
                    Method.COUPLED,
                )
                for i in range(2)
            ]
            plain = [(*case[:2], "", 0, Method.COUPLED) for case in cases]
            assert service.texts(cases) == service.texts(plain), (turn, source)
    assert all(head.num_checked > NUM_NEW for head in heads)


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
    assert (log.start, log.end) == (2, 2) and not len(log.take())
    log.forget()
    assert log.take() is None
