"""The learned head: it learns a shift, never drafts while it is worse, and is kept for one draft and one target."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shutil
import stat
import warnings
from pathlib import Path

import numpy as np
import pytest

from outrider.common.errors import ModelError, UsageError
from outrider.common.types import TokenLogprobs
from outrider.edge_client.drafting.learned.files import head_path, head_paths, load_head, save_head
from outrider.edge_client.drafting.learned.head import LearnedHead
from outrider.edge_client.drafting.learned.learner import Learner, num_bytes
from outrider.edge_client.drafting.rows.rows import Rows, rows_of

NUM_TOKENS, HIDDEN, TEMPERATURE = 200, 32, 0.8
RNG = np.random.default_rng(3)
TABLE = RNG.standard_normal((NUM_TOKENS, HIDDEN)).astype(np.float32) * 0.5
SHIFT = RNG.standard_normal((NUM_TOKENS, HIDDEN)).astype(np.float32) * 0.25


def row_of(hidden: np.ndarray) -> Rows:
    rows = rows_of((TABLE @ hidden)[None].astype(np.float32), TEMPERATURE)
    return Rows(rows.logits, rows.probs, rows.tempered_logits, rows.tempered_probs, hidden=hidden[None])


def told_of(logits: np.ndarray) -> TokenLogprobs:
    logs = logits - np.log(np.exp(logits).sum())
    top = np.argsort(-logs)[:8]
    return TokenLogprobs(-1.0, -1.0, tuple(top.tolist()), tuple(logs[top].tolist()))


def teach(head: LearnedHead, shift: np.ndarray, num_tokens: int, is_noise: bool = False) -> None:
    rng = np.random.default_rng(5)
    for position in range(num_tokens):
        hidden = rng.standard_normal(HIDDEN).astype(np.float32)
        head.adapt(row_of(hidden), 0, TEMPERATURE, position, (1, 2))
        noise = rng.standard_normal(NUM_TOKENS) * 2 if is_noise else 0.0
        head.learn(position, (1, 2), told_of((TABLE + shift) @ hidden + noise))


def test_it_learns_a_planted_shift_and_rows_stay_softmaxes() -> None:
    head = LearnedHead(NUM_TOKENS, HIDDEN)
    teach(head, SHIFT, 1500)
    counts = head.counts
    assert counts.num_tokens == 1500 and head.is_drafting
    assert head.gain > 0.03 and counts.drafted_overlap > counts.base_overlap
    rows = row_of(np.ones(HIDDEN, np.float32))
    before = rows.logits.copy()
    head.adapt(rows, 0, TEMPERATURE, 9, (1,))
    expected = rows_of(rows.logits, TEMPERATURE)
    assert np.abs(rows.logits - before).max() > 0.01
    assert np.allclose(rows.probs, expected.probs, atol=1e-6)
    assert np.allclose(rows.tempered_probs, expected.tempered_probs, atol=1e-6)
    assert np.allclose(rows.tempered_logits, expected.tempered_logits, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.001, 0.01, 0.05, 0.2, 1.0, 3.0])
@pytest.mark.parametrize("sharpness", [1.0, 8.0])  # with 8 one id is nearly certain
def test_rows_stay_softmaxes_at_any_temperature_whatever_was_learned(
    temperature: float, sharpness: float
) -> None:
    head = LearnedHead(NUM_TOKENS, HIDDEN, gain=1.0)
    for scale in (0.1, 2.0, 30.0):
        head.table[:] = np.random.default_rng(1).standard_normal(head.table.shape) * scale
        hidden = np.random.default_rng(2).standard_normal(HIDDEN).astype(np.float32) * sharpness
        made = rows_of((TABLE @ hidden)[None].astype(np.float32), temperature)
        rows = Rows(made.logits, made.probs, made.tempered_logits, made.tempered_probs, hidden=hidden[None])
        head.adapt(rows, 0, temperature, 1, ())
        for logits, probs in ((rows.logits, rows.probs), (rows.tempered_logits, rows.tempered_probs)):
            wide = logits.astype(np.float64) - logits.max()
            assert np.allclose(probs, np.exp(wide) / np.exp(wide).sum(), atol=2e-5)
            assert probs.max() <= 1.0 and np.isfinite(probs).all()


def test_a_head_that_is_worse_never_drafts() -> None:
    """The target is the draft, told with noise: there is nothing to learn, and every step does harm."""
    head = LearnedHead(NUM_TOKENS, HIDDEN)
    teach(head, np.zeros_like(SHIFT), 800, is_noise=True)
    assert head.counts.head_overlap < head.counts.base_overlap + 0.05 * 800
    head.table += RNG.standard_normal(head.table.shape).astype(np.float32)  # spoiled outright
    head.gain = 1.0  # it is drafting
    teach(head, np.zeros_like(SHIFT), 1500)
    assert head.counts.num_drafting < 1400
    head.table[:] = RNG.standard_normal(head.table.shape) * 3
    head.gain = 0.0
    rows, drafting = row_of(np.ones(HIDDEN, np.float32)), head.counts.num_drafting
    before = rows.logits.copy()
    head.adapt(rows, 0, TEMPERATURE, 3, ())
    assert (rows.logits == before).all() and head.counts.num_drafting == drafting


def test_a_verdict_on_another_text_teaches_nothing() -> None:
    head = LearnedHead(NUM_TOKENS, HIDDEN)
    head.adapt(row_of(np.ones(HIDDEN, np.float32)), 0, TEMPERATURE, 4, (1, 2))
    head.learn(4, (1, 3), told_of(TABLE[:, 0]))
    head.learn(5, (1, 2), told_of(TABLE[:, 0]))
    assert head.counts.num_tokens == 0 and not head.table.any()


def test_a_file_is_for_one_draft_and_one_target(tmp_path: Path) -> None:
    head = LearnedHead(NUM_TOKENS, HIDDEN)
    teach(head, SHIFT, 20)
    path = head_path(tmp_path, "d" * 64, "t" * 64)
    save_head(path, head, "d" * 64, "t" * 64)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and head_paths(tmp_path) == [path]
    again = LearnedHead(NUM_TOKENS, HIDDEN)
    load_head(path, again, "d" * 64, "t" * 64)
    assert (again.table == head.table).all() and again.counts == head.counts and again.gain == head.gain
    for draft, target, word in (("e", "t", "another draft"), ("d", "u", "another target")):
        with pytest.raises(ModelError, match=f"{word}.*draft learned reset"):
            load_head(path, again, draft * 64, target * 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gain", None),
        ("gain", "x"),
        ("gain", math.inf),
        ("draft_fingerprint", None),
        ("counts", {"num_tokens": "x"}),
        ("counts", {"num_tokens": 0.5}),
        ("settings", [1]),
        ("table", np.zeros((NUM_TOKENS, HIDDEN + 1), "U3")),
        ("table", np.full((NUM_TOKENS, HIDDEN + 1), 1e300)),
        ("table", np.full((NUM_TOKENS, HIDDEN + 1), math.nan, np.float32)),
    ],
)
def test_a_file_that_is_not_what_was_saved_is_refused(tmp_path: Path, name: str, value: object) -> None:
    path, head = head_path(tmp_path, "d", "t"), LearnedHead(NUM_TOKENS, HIDDEN)
    save_head(path, head, "d", "t")
    with np.load(path) as file:
        facts, table = json.loads(str(file["facts"])), file["table"]
    if name == "table":
        table = value
    elif value is None:
        del facts[name]
    else:
        facts[name] = value
    with path.open("wb") as file:
        np.savez(file, table=table, facts=np.array(json.dumps(facts)))
    with pytest.raises(ModelError, match=r"is damaged.*draft learned reset"):
        load_head(path, head, "d", "t")


def test_any_damage_of_a_file_is_named(tmp_path: Path) -> None:
    path, head = head_path(tmp_path, "d", "t"), LearnedHead(16, 8)
    save_head(path, head, "d", "t")
    content = path.read_bytes()
    ends = [*range(0, 400), *range(len(content) - 600, len(content))]  # headers, facts and the directory
    for place in ends:
        for bit in (1, 8, 32):
            damaged = bytearray(content)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with contextlib.suppress(ModelError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_head(path, head, "d", "t")
    path.write_bytes(content[:100])
    with pytest.raises(ModelError, match="is damaged"):
        load_head(path, head, "d", "t")


def test_a_failed_meeting_leaves_the_head_of_the_target_before(tmp_path: Path) -> None:
    learner = Learner(tmp_path, "d" * 64, NUM_TOKENS, HIDDEN)
    learner.meet("a" * 64)
    first = learner.head
    assert first is not None
    first.counts.num_tokens = 700
    head_path(tmp_path, "d" * 64, "b" * 64).write_bytes(b"no head")
    with pytest.raises(ModelError, match="is damaged"):
        learner.meet("b" * 64)
    learner.meet("a" * 64)
    assert learner.head is first and first.counts.num_tokens == 700


def test_more_than_a_probability_teaches_no_infinity_and_none_is_saved(tmp_path: Path) -> None:
    head = LearnedHead(NUM_TOKENS, HIDDEN)
    for position in range(5):
        head.adapt(row_of(np.ones(HIDDEN, np.float32)), 0, TEMPERATURE, position, (1,))
        head.learn(position, (1,), TokenLogprobs(0.0, 0.0, tuple(range(200)), (100.0,) * 200))
    assert head.counts.num_tokens and np.isfinite(head.table).all()
    head.table[0, 0] = math.inf
    with pytest.raises(UsageError, match="it is not finite"):
        save_head(head_path(tmp_path, "d", "t"), head, "d", "t")
    assert not head_paths(tmp_path)


def test_a_head_that_cannot_be_saved_is_logged_once_and_learning_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = Learner(tmp_path / "heads", "d" * 64, NUM_TOKENS, HIDDEN)
    learner.meet("t" * 64)
    assert learner.head is not None
    shutil.rmtree(tmp_path / "heads")
    with caplog.at_level(logging.WARNING, "outrider"):
        for number in (700, 1400, 2100):
            learner.head.counts.num_tokens = number
            learner.ended()
        assert caplog.text.count("the head cannot be saved") == 1
        (tmp_path / "heads").mkdir()
        learner.head.counts.num_tokens = 2800
        learner.ended()
        assert len(head_paths(tmp_path / "heads")) == 1
        shutil.rmtree(tmp_path / "heads")
        learner.head.counts.num_tokens = 2801
        learner.meet("u" * 64)
        assert caplog.text.count("the head cannot be saved") == 2 and learner.head.counts.num_tokens == 0


def test_bytes_are_those_of_the_message() -> None:
    from outrider.common.codec.responses_out import _encode_logprobs

    entry = TokenLogprobs(-0.5, -0.25, (3, 200, 8000, 0), (-0.5, -1.0, -2.0, -3.0))
    assert num_bytes([entry]) == _encode_logprobs(entry).ByteSize() + 2  # the field's header
