"""EAGLE drafts by the rows of its layer: those of plain whole forwards, in trees, after verdicts and rollbacks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from support.eagle import HEAD_DIM, KV_HEADS, LAYOUTS, PlainEagle, make_eagle
from support.models import make_tiny_target
from test_heads_text import NUM_NEW, Truth, cloud_only, make_prompt

from benchmarks.heads.service import Case, Service
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.engine.colocated.drafter import CoLocatedDrafter
from outrider.cloud_verifier.engine.colocated.reader import READ_CHUNK
from outrider.cloud_verifier.engine.work import Work
from outrider.cloud_verifier.heads.eagle import CHUNK, EagleHead, EagleRun, EagleSequence
from outrider.cloud_verifier.heads.eagle_kv import BLOCK
from outrider.cloud_verifier.heads.features import FeatureLog
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.sequence import Asked
from outrider.common.types import Method, SamplingParams, TokenIds
from outrider.edge_client.drafting.rows.rows import Rows

NUM_LAYERS = 4


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
        self._begin()

    def another(self) -> Drafting:
        """Returns one for another text with the same head."""
        other = copy.copy(self)
        other._begin()
        return other

    def _begin(self) -> None:
        sequence = self.head.sequence(SamplingParams(temperature=0.0))
        assert isinstance(sequence, EagleSequence)
        self.sequence = sequence
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
            self._run = self.head.start([self.sequence])
            (rows,) = self._run.roots()
        self.check(rows, ())

    def check_paths(self, paths: Sequence[TokenIds]) -> None:
        runs: list[None] = []
        counting = self.head.weights.register_forward_hook(lambda *_: runs.append(None))
        with torch.inference_mode():
            (found,) = self._run.after([(0, paths)])
        counting.remove()
        for path, rows in zip(paths, found, strict=True):
            self.check(rows, path)
        assert len(runs) == 1
        self.sequence.check_integrity()

    def check(self, rows: Rows, path: TokenIds) -> None:
        expected = self._plain.row(self.text, self.known, path).numpy()
        np.testing.assert_allclose(rows.logits[0], expected[: rows.logits.shape[1]], atol=1e-4, rtol=1e-4)


def _output_embedding(backend: PagedBackend) -> torch.Tensor:
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


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"norm_output": True}])
def test_another_width_and_other_layers_are_read(
    options: dict[str, bool], target: Path, tmp_path: Path
) -> None:
    directory = make_eagle(
        tmp_path,
        "speculators",
        size=96,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        **options,
    )
    drafting = Drafting(target, directory)
    assert drafting.head.facts.feature_layers == (0, 1, 2)  # those before the named ones
    drafting.commit(make_prompt(2, 9))
    drafting.check_root()
    drafting.check_paths([(7,), (8,)])
    drafting.check_paths([(7, 3), (8, 5)])


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


def test_rows_of_sequences_together_are_those_of_each(target: Path, tmp_path: Path) -> None:
    first = Drafting(target, make_eagle(tmp_path, "specforge"))
    every = [first, *(first.another() for _ in range(3))]
    for number, (each, length) in enumerate(zip(every, (40, 3, CHUNK + 60, 30), strict=True)):
        each.commit(make_prompt(number, length), first_known=12 if length == 30 else None)  # a cached prefix
    every[1].check_root()  # has nothing to read when the others have
    asked: list[list[Asked]] = [
        [(0, [(7,), (8,), (9,)]), (1, [(1,)]), (2, [(5,), (6,)]), (3, [(4,), (3,)])],
        [(0, [(8, 3)]), (2, [(6, 1), (5, 1), (6, 2)]), (3, [(3, 3)])],
        [(3, [(3, 3, 9), (4, 9)]), (2, [(5, 1, 8)])],
    ]
    for _ in range(2):
        with torch.inference_mode():
            run = first.head.start([each.sequence for each in every])
            assert isinstance(run, EagleRun) and [len(group) for group, _ in run._groups] == [3, 1]
            for each, rows in zip(every, run.roots(), strict=True):
                each.check(rows, ())
            for step in asked:
                for (number, paths), found in zip(step, run.after(step), strict=True):
                    for path, rows in zip(paths, found, strict=True):
                        every[number].check(rows, path)
        for number, each in enumerate(every):
            each.sequence.check_integrity()
            each.commit(make_prompt(10 + number, 1 + 3 * number))


class CheckedRun(EagleRun):
    """Checks each row that EAGLE computes, and drafts by what the target says, so that drafts are accepted."""

    _head: CheckedHead

    def roots(self) -> list[Rows]:
        return [self._checked(rows, number, ()) for number, rows in enumerate(super().roots())]

    def after(self, asked: Sequence[Asked]) -> list[list[Rows]]:
        self._head.most_together = max(self._head.most_together, len(asked))
        return [
            [self._checked(row, number, path) for row, path in zip(rows, paths, strict=True)]
            for rows, (number, paths) in zip(super().after(asked), asked, strict=True)
        ]

    def _checked(self, rows: Rows, number: int, path: TokenIds) -> Rows:
        head, sequence = self._head, self._sequences[number]
        text = tuple(sequence.token_ids)
        known = {position: head.truth.of(text)[1][position] for position in sequence.kv.positions}
        expected = head.plain.row(text, known, path).numpy()
        is_right = np.allclose(rows.logits[0], expected[: rows.logits.shape[1]], atol=1e-3, rtol=1e-3)
        head.num_wrong += not is_right  # a draft that raises is left out, and nobody is told
        head.num_checked += 1
        head.num_missing += len(text) - 1 - len(known)
        return sequence.rows(head.truth.of((*text, *path))[0][-1:, : head.num_tokens].numpy())


class CheckedHead(EagleHead):
    """Drafts by `CheckedRun`."""

    def __init__(self, head: EagleHead, truth: Truth, plain: PlainEagle) -> None:
        super().__init__(head.backend, head.facts, head.weights)
        self._run = CheckedRun
        self.truth, self.plain = truth, plain
        self.num_checked = self.num_missing = self.num_wrong = self.most_together = 0


def make_checked(target: Path, directory: Path, backend: PagedBackend) -> CheckedHead:
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
    num_accepted = 0
    for turn, temperature in enumerate((0.0, 0.8)):
        cases = [
            Case(
                make_prompt(10 * turn + seed, 3 + 9 * seed),
                SamplingParams(temperature=temperature, seed=seed),
                "eagle",
                num_nodes,
                num_nodes > 4,
                method,
            )
            for seed, num_nodes in enumerate((9, 5, 2))
        ]
        texts = service.write(cases, NUM_NEW)
        num_accepted += sum(text.num_accepted for text in texts)
        if method is Method.COUPLED or temperature == 0:
            for case, text in zip(cases, texts, strict=True):
                assert text.token_ids == cloud_only(service, case)
    assert num_accepted > 2 * NUM_NEW, "what knows the target's choice was hardly ever accepted"
    assert head.num_checked > NUM_NEW and not head.num_missing and not head.num_wrong
    assert head.most_together == 3


def test_rows_are_right_after_an_eviction_and_a_cached_prefix(target: Path, tmp_path: Path) -> None:
    backend = load_target(target)
    head = make_checked(target, make_eagle(tmp_path, "eagle"), backend)
    service = Service(backend, [head])
    for seed in range(2):  # the second one's prompt is cached
        case = Case(make_prompt(1, 40), SamplingParams(seed=seed), "eagle", 8)
        (text,) = service.write([case], NUM_NEW, is_evicted=True)
        assert text.token_ids == cloud_only(service, case)
        assert text.num_accepted > NUM_NEW // 3
    assert head.num_missing and not head.num_wrong


def test_a_long_prompt_is_read_beside_the_steps(target: Path, tmp_path: Path) -> None:
    backend = load_target(target, kv_bytes=64 << 20)
    head = make_checked(target, make_eagle(tmp_path, "specforge"), backend)
    service = Service(backend, [head])
    for seed in range(40):  # on a busy machine a text may end before its prompt is read
        case = Case(make_prompt(5, READ_CHUNK + 80), SamplingParams(seed=seed), "eagle", 8)
        (text,) = service.write([case], NUM_NEW)
        assert text.token_ids == cloud_only(service, case) and not head.num_wrong
        if head.num_checked:
            return
    raise AssertionError("no text of 40 was drafted for")


def test_features_of_many_prompts_are_bounded(target: Path, tmp_path: Path) -> None:
    backend = load_target(target, kv_bytes=32 << 20)
    head = load_head(make_eagle(tmp_path, "specforge"), backend)
    row_bytes = 128 * 4
    drafter = CoLocatedDrafter(None, [head], max_kv_bytes=100 * row_bytes)
    sessions = [
        SimpleNamespace(opening=SimpleNamespace(draft_source="eagle"), features=None) for _ in range(5)
    ]
    for chunk in range(1, 4):
        for session in sessions:
            session.kv_length = 16 * chunk
            paged = backend.new_sequence()
            backend.forward([ForwardItem(paged, make_prompt(chunk, 16), 1, ())])
            backend.close(paged)
            drafter.note_features([cast(Work, SimpleNamespace(session=session, num_logit_rows=0))], [16])
            logs = [each.features for each in sessions if each.features]
            assert sum(log.num_bytes for log in logs) <= (100 + 16) * row_bytes
    assert all(log.end == 48 and log.start < 48 for log in logs), "the newest features stay"
    assert min(log.start for log in logs) < max(log.start for log in logs), "more was dropped than had to be"
    log = FeatureLog(keeps_all=True)
    log.append(7, torch.arange(5.0)[:, None])
    assert log.drop_oldest() == 2 * 4
    assert (log.start, log.end, log.take()[:, 0].tolist()) == (9, 12, [2, 3, 4])
    assert log.drop_oldest() == 0, "the last one stays"


def test_a_generation_beyond_the_bound_goes_on_without_drafts(target: Path, tmp_path: Path) -> None:
    backend = load_target(target, kv_bytes=64 << 20)
    head = make_checked(target, make_eagle(tmp_path, "specforge"), backend)
    cases = [Case(make_prompt(seed, 20), SamplingParams(seed=seed), "eagle", 5) for seed in range(3)]
    every = Service(backend, [head])
    two = Service(backend, [head], max_kv_bytes=2 * BLOCK * 2 * KV_HEADS * HEAD_DIM * 4)
    plain = [cloud_only(every, case) for case in cases]
    for service, num_drafting in ((every, 3), (two, 2)):
        texts = service.write(cases, NUM_NEW)
        assert [text.token_ids for text in texts] == plain
        assert sum(text.num_accepted > NUM_NEW // 3 for text in texts) == num_drafting


@pytest.mark.parametrize(("arch", "dtype"), [("gpt2", "float32"), ("llama", "bfloat16")])
def test_a_target_of_transformers_and_one_in_bfloat16_are_drafted_for(
    arch: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_tiny_target(tmp_path / "target", arch, num_layers=NUM_LAYERS)
    backend = load_target(target, dtype=dtype)
    head = load_head(make_eagle(tmp_path / "heads", "specforge"), backend)
    service = Service(backend, [head])
    case = Case(make_prompt(1, 20), SamplingParams(temperature=0.0), "eagle", 8)
    (text,) = service.write([case], NUM_NEW)
    assert len(text.token_ids) == NUM_NEW
    assert dtype != "float32" or text.token_ids == cloud_only(service, case)
    assert "the draft failed" not in caplog.text
