"""EAGLE drafts by the rows of its layer: those of plain whole forwards, in trees, after verdicts and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.eagle import LAYOUTS, PlainEagle, make_eagle
from support.models import make_tiny_target
from test_heads_text import NUM_NEW, Service, Truth, make_prompt

from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.transformers_backend import TransformersBackend
from outrider.cloud_verifier.engine.colocated import READ_CHUNK
from outrider.cloud_verifier.heads.eagle import CHUNK, EagleHead, EagleSequence
from outrider.cloud_verifier.heads.eagle_kv import BLOCK
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.common.types import Method, SamplingParams, TokenIds
from outrider.edge_client.drafting.rows.rows import Rows

NUM_LAYERS = 4
LAST_LAYER = NUM_LAYERS  # its index after the final norm


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), num_layers=NUM_LAYERS)


class Drafting:
    """A draft's sequence, driven by hand beside the plain computation."""

    def __init__(self, target: Path, directory: Path) -> None:
        backend = load_target(target, kv_bytes=32 << 20)
        head = load_head(directory, backend)
        assert isinstance(head, EagleHead)
        self.head, self._backend = head, backend
        every = torch.arange(backend.vocab_size)
        self._plain = PlainEagle(directory, backend.decoder.embed(every), _output_embedding(backend))
        self.sequence = head.sequence(SamplingParams(temperature=0.0))
        assert isinstance(self.sequence, EagleSequence)
        self.text: list[int] = []
        self.known: dict[int, torch.Tensor] = {}
        self._log = FeatureLog(keeps_all=True)

    def commit(self, token_ids: Sequence[int], first_known: int | None = None) -> None:
        """Commits tokens, whose features are those of a forward of the whole text, from a position on."""
        self.text += token_ids
        start = max(self.known, default=-1) + 1 if first_known is None else first_known
        paged = self._backend.new_sequence()
        self._backend.forward([ForwardItem(paged, tuple(self.text[:-1]), 1, ())])
        self._backend.close(paged)
        rows = slice(start, len(self.text) - 1)
        features = [self._backend.features[layer][rows] for layer in self.head.facts.feature_layers]
        self.known |= zip(range(rows.start, rows.stop), torch.cat(features, dim=-1), strict=True)
        self._log.append(start, self.head.last_features(rows))
        self.sequence.read(self._log)
        self.sequence.commit(token_ids)

    def truncate(self, position: int) -> None:
        del self.text[position:]
        self.known = {each: feature for each, feature in self.known.items() if each < position - 1}
        self._log.truncate(position - 1)
        self.sequence.truncate(position)

    def check_root(self) -> None:
        with torch.inference_mode():
            self._check(self.sequence.feed_root(), ())

    def check_paths(self, paths: Sequence[TokenIds]) -> None:
        with torch.inference_mode():
            runs = 0
            for path, (rows, num_runs) in zip(paths, self.sequence.feed_paths(paths), strict=True):
                self._check(rows, path)
                runs += num_runs
        assert runs == 1
        self.sequence.check_integrity()

    def _check(self, rows: Rows, path: TokenIds) -> None:
        expected = self._plain.row(self.text, self.known, path).numpy()
        np.testing.assert_allclose(rows.logits[0], expected[: rows.logits.shape[1]], atol=1e-4, rtol=1e-4)


def _output_embedding(backend: TransformersBackend) -> torch.Tensor:
    size = backend.decoder.embed(torch.zeros(1, dtype=torch.int64)).shape[-1]
    return backend.decoder.score(torch.eye(size)).T


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_whole_forwards(layout: str, target: Path, tmp_path: Path) -> None:
    drafting = Drafting(target, make_eagle(tmp_path, layout))
    drafting.commit(make_prompt(1, 40))
    for _ in range(2):  # a second proposal feeds nothing
        drafting.check_root()
        drafting.check_paths([(7,), (8,), (9,)])
        drafting.check_paths([(8, 3), (7, 3), (8, 5)])
        drafting.check_paths([(8, 5, 6)])
    drafting.commit((8, 5, 11))  # two nodes that came true, and the target's own token
    drafting.check_root()
    drafting.check_paths([(1,), (2,)])
    drafting.check_paths([(2, 2)])
    drafting.commit((400,))  # nothing came true
    drafting.check_root()
    drafting.check_paths([(1,), (2,)])
    drafting.truncate(30)
    assert not drafting.sequence.is_ready
    assert not drafting.sequence.propose(4).token_ids
    drafting.commit((20, 21, 22))
    drafting.check_root()
    drafting.check_paths([(3,)])
    drafting.sequence.close()
    assert drafting.sequence.num_kv_bytes == 0


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_another_width_and_other_layers_are_read(
    norm_before_residual: bool, target: Path, tmp_path: Path
) -> None:
    directory = make_eagle(
        tmp_path,
        "speculators",
        size=96,
        norm_before_residual=norm_before_residual,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
    )
    drafting = Drafting(target, directory)
    assert drafting.head.facts.feature_layers == (0, 1, 2)  # those before the named ones
    drafting.commit(make_prompt(2, 9))
    drafting.check_root()
    drafting.check_paths([(7,), (8,)])


def test_long_texts_grow_the_kv_by_blocks_and_are_fed_in_chunks(target: Path, tmp_path: Path) -> None:
    drafting = Drafting(target, make_eagle(tmp_path, "specforge"))
    drafting.commit(make_prompt(3, CHUNK + 60))
    assert drafting.sequence.num_kv_bytes > 0, "features that wait count"
    drafting.check_root()
    drafting.check_paths([(7,), (8,)])
    assert drafting.sequence.num_kv_bytes % BLOCK == 0
    drafting.commit((8, 5))
    drafting.check_root()


def test_missing_features_leave_the_others_at_their_positions(target: Path, tmp_path: Path) -> None:
    drafting = Drafting(target, make_eagle(tmp_path, "specforge"))
    drafting.commit(make_prompt(4, 30), first_known=12)  # a cached prefix
    drafting.check_root()
    drafting.check_paths([(7,)])
    drafting.commit((7, 8, 9, 10, 11), first_known=32)  # as after an eviction
    assert sorted(drafting.known) == [*range(12, 29), 32, 33]
    drafting.check_root()
    drafting.check_paths([(7,), (6,)])


class CheckedSequence(EagleSequence):
    """Checks each row that EAGLE computes, and drafts by what the target says, so that drafts are accepted."""

    _head: CheckedHead

    def feed_root(self) -> Rows:
        return self._checked(super().feed_root(), ())

    def feed_paths(self, paths: Sequence[TokenIds]) -> Iterator[tuple[Rows, int]]:
        for path, (rows, num_runs) in zip(paths, super().feed_paths(paths), strict=True):
            yield self._checked(rows, path), num_runs

    def _checked(self, rows: Rows, path: TokenIds) -> Rows:
        head, text = self._head, tuple(self._text)
        known = {position: head.truth.of(text)[1][position] for position in self._kv.positions}
        expected = head.plain.row(text, known, path).numpy()
        np.testing.assert_allclose(rows.logits[0], expected[: rows.logits.shape[1]], atol=1e-3, rtol=1e-3)
        head.num_checked += 1
        head.num_missing += len(text) - 1 - len(known)
        return self._rows(head.truth.of((*text, *path))[0][-1:])


class CheckedHead(EagleHead):
    """Drafts by `CheckedSequence`."""

    def __init__(self, head: EagleHead, truth: Truth, plain: PlainEagle) -> None:
        super().__init__(head.backend, head.facts, head.weights)
        self._kind = CheckedSequence
        self.truth, self.plain = truth, plain
        self.num_checked = self.num_missing = 0


def make_checked(target: Path, directory: Path, backend: TransformersBackend) -> CheckedHead:
    head = load_head(directory, backend)
    assert isinstance(head, EagleHead)
    every = torch.arange(backend.vocab_size)
    plain = PlainEagle(directory, backend.decoder.embed(every), _output_embedding(backend))
    return CheckedHead(head, Truth(target, head.facts.feature_layers), plain)


@pytest.mark.parametrize("method", [Method.COUPLED, Method.SPARSE])
def test_texts_beside_each_other_are_cloud_onlys(target: Path, tmp_path: Path, method: Method) -> None:
    backend = load_target(target, kv_bytes=64 << 20)
    head = make_checked(target, make_eagle(tmp_path, "specforge"), backend)
    service = Service(backend, [head])
    for turn, temperature in enumerate((0.0, 0.8)):
        cases = [
            (
                make_prompt(10 * turn + i, 3 + 9 * i),
                SamplingParams(temperature=temperature, seed=i),
                "eagle",
                num_nodes,
                method,
            )
            for i, num_nodes in enumerate((9, 5, 2))
        ]
        texts = service.texts(cases)
        if method is Method.COUPLED or temperature == 0:
            alone = Service(backend, [])
            assert texts == [alone.texts([(*case[:2], "", 0, Method.COUPLED)])[0] for case in cases]
    assert service.num_accepted > 2 * NUM_NEW, "what knows the target's choice was hardly ever accepted"
    assert head.num_checked > NUM_NEW and not head.num_missing


def test_rows_are_right_after_evictions_and_a_cached_prefix(target: Path, tmp_path: Path) -> None:
    backend = load_target(target, kv_tokens=256)
    head = make_checked(target, make_eagle(tmp_path, "eagle"), backend)
    service = Service(backend, [head])
    prompt = make_prompt(1, 40)
    for _ in range(2):
        cases = [
            (prompt if i % 2 else make_prompt(10 + i, 30), SamplingParams(seed=i), "eagle", 8, Method.COUPLED)
            for i in range(2)
        ]
        plain = [(*case[:2], "", 0, Method.COUPLED) for case in cases]
        assert service.texts(cases) == service.texts(plain)
    assert head.num_checked > NUM_NEW and head.num_missing, "the prefix cache gave no tokens without features"


def test_a_long_prompt_is_read_beside_the_steps(target: Path, tmp_path: Path) -> None:
    backend = load_target(target, kv_bytes=64 << 20)
    head = make_checked(target, make_eagle(tmp_path, "specforge"), backend)
    case = (make_prompt(5, READ_CHUNK + 80), SamplingParams(seed=3), "eagle", 8, Method.COUPLED)
    assert Service(backend, [head]).texts([case]) == Service(backend, []).texts([(*case[:2], "", 0, case[4])])
    assert head.num_checked
