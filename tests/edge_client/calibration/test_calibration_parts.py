"""Passages, drafted tokens along a text, percentiles, and the curve with writers that are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from outrider.common.errors import UsageError
from outrider.common.types import Draft, SamplingParams, Signals, TokenIds
from outrider.edge_client.calibration.curve import (
    KEEP_ALL,
    NO_GATE,
    Write,
    Written,
    curve_csv,
    curve_table,
    measure_curve,
)
from outrider.edge_client.calibration.passages import cut_passages, read_texts
from outrider.edge_client.calibration.quantiles import Sample, auc, draft_along, sort_samples, thresholds_at
from outrider.edge_client.gate.thresholds import GateThresholds

# ------------------------------------------------------------------------------------------------- text


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def cut(*documents: str, num: int = 10, prompt: int = 3, following: int = 2, needs: bool = True) -> list[str]:
    """Passages as "prompt>following"."""
    passages = cut_passages(
        documents,
        letters,
        num_passages=num,
        num_prompt_tokens=prompt,
        num_following_tokens=following,
        needs_following=needs,
    )
    return [">".join("".join(map(chr, ids)) for ids in (p.prompt_ids, p.following_ids)) for p in passages]


def test_documents_are_cut_into_passages_that_do_not_overlap() -> None:
    assert cut("abcdefghijkl") == ["abc>de", "fgh>ij"]  # behind "kl" nothing follows
    assert cut("abcdefghijkl", needs=False) == ["abc>de", "def>gh", "ghi>jk", "jkl>"][:3]


def test_prompts_alone_are_taken_from_all_of_a_document() -> None:
    assert cut("abcdefghijkl", following=0, needs=False) == ["abc>", "def>", "ghi>", "jkl>"]
    assert cut("abcdefgh", "ij", following=0, needs=False) == ["abc>", "def>", "ij>"]
    assert cut("abcdefghijkl", num=2, following=0, needs=False) == ["abc>", "ghi>"]


def test_a_short_document_is_a_prompt_as_a_whole_or_half_of_it_is() -> None:
    assert cut("ab", needs=False) == ["ab>"]
    assert cut("abc", "ab") == ["a>bc", "a>b"]
    with pytest.raises(UsageError, match=r"--text: too short"):
        cut("a")


def test_passages_are_taken_from_the_whole_text_evenly() -> None:
    document = "".join(chr(ord("A") + n) for n in range(50))
    assert cut(document, num=2) == ["ABC>DE", "Z[\\>]^"]


def test_a_line_of_jsonl_may_hold_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "one\u2028two\x85"}\r\n{"prompt": "three"}\n'.encode())
    assert read_texts([path]).documents == ("one\u2028two\x85", "three")


def test_files_and_lines_of_jsonl_are_documents(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.md", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo")
    lines.write_text(json.dumps({"text": "three"}) + "\n\n" + json.dumps({"prompt": "four"}) + "\n")
    text = read_texts([plain, lines])
    assert text.documents == ("one\ntwo", "three", "four") and text.names == ("a.md", "b.jsonl")
    assert len(text.sha256) == 64 and text.sha256 != read_texts([plain]).sha256


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, r"--text .*none\.txt: No such file"),
        ("latin.txt", b"\xe4\xff", r"latin\.txt is not UTF-8"),
        ("empty.txt", b" \n", r"there is no text in it"),
        ("bad.jsonl", b'{"text": "a"}\n{"other": 1}\n', r"bad\.jsonl:2: want an object"),
        ("list.jsonl", b"[1]\n", r"list\.jsonl:1: want an object"),
        ("null.jsonl", b'{"text": null}\n', r"null\.jsonl:1: want an object"),
    ],
)
def test_files_that_cannot_serve_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_texts([tmp_path / name])


# ---------------------------------------------------------------------------------------------- samples


class CountingDraft:
    """Drafts its own text by position; the NLL of a token is its position."""

    num_tokens, max_context, eos_token_ids = 100, 1000, (0,)
    fingerprint = tokenizer_fingerprint = "d"
    signal_names = ("nll", "entropy", "margin")

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.lengths: list[int] = []
        self.position = 0

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> CountingDraft:
        return self

    def commit(self, token_ids: Sequence[int]) -> None:
        self.position += len(token_ids)

    def propose(self, num_draft_tokens: int, should_stop: object = None) -> Draft:
        end = min(self.position + num_draft_tokens, self.max_context)
        places = range(self.position, end)
        self.lengths.append(len(places))
        signals = tuple(Signals(0.0, float(place), 1.0) for place in places)
        return Draft(tuple(self.text[place] for place in places), (1.0,) * len(places), signals)

    def close(self) -> None: ...


def along(draft: CountingDraft, text: Sequence[int], depth: int = 3) -> list[tuple[float, bool | None]]:
    samples = draft_along(draft, SamplingParams(), 0, [90, 91], text, depth)  # type: ignore[arg-type]
    return [(sample.signals.nll, sample.is_right) for sample in samples]


def test_rounds_go_along_a_text_as_a_session_would() -> None:
    draft = CountingDraft([90, 91, 1, 2, 99, 4, 5, 6, 7])
    samples = along(draft, [1, 2, 3, 4, 5, 6, 7])
    first = [(2.0, True), (3.0, True), (4.0, False)]
    assert samples == [*first, (5.0, True), (6.0, True), (7.0, True)] and draft.lengths == [3, 3]


def test_tokens_behind_a_wrong_one_count_and_are_not_judged() -> None:
    samples = along(CountingDraft([90, 91, 99, 2, 3, 4]), [1, 2, 3])
    assert samples == [(2.0, False), (3.0, None), (4.0, None), (3.0, True), (4.0, True)]


def test_a_draft_that_is_full_ends_its_text() -> None:
    draft = CountingDraft([90, 91, 1, 2, 3])
    draft.max_context = 3
    assert along(draft, [1, 2, 3]) == [(2.0, True)]


# ------------------------------------------------------------------------------------------- thresholds


def signals_of(*values: float, variance: bool = False) -> list[Signals]:
    return [Signals(10 * v, v, 1 - v, v / 2 if variance else None) for v in values]


def test_thresholds_are_percentiles_and_of_the_margin_from_the_other_end() -> None:
    thresholds = thresholds_at(signals_of(*(n / 100 for n in range(101))), 80)
    assert (thresholds.nll, thresholds.entropy) == pytest.approx((0.8, 8.0))
    assert thresholds.margin == pytest.approx(0.2) and thresholds.variance is None


def test_the_variance_counts_where_every_token_has_one() -> None:
    told = signals_of(*(n / 100 for n in range(101)), variance=True)
    assert thresholds_at(told, 80).variance == pytest.approx(0.4)
    assert thresholds_at([*told, *signals_of(0.5)], 80).variance is None


def test_the_share_of_hard_tokens_and_how_often_the_target_has_the_others() -> None:
    samples = [
        *(Sample(signals, True) for signals in signals_of(0.1, 0.2, 0.3)),
        Sample(signals_of(0.9)[0], False),
        Sample(signals_of(0.95)[0], None),
    ]
    found = sort_samples(samples, GateThresholds(nll=0.5, margin=0.06), is_target=True)
    assert found.hard_share == 0.4 and found.hard_share_of == {"nll": 0.4, "margin": 0.2}
    assert (found.right_of_easy, found.right_of_hard) == (1.0, 0.0)
    assert found.auc_of["nll"] == 1.0, "the rejected one has the highest of those that are judged"
    unjudged = sort_samples(samples, GateThresholds(nll=0.5), is_target=False)
    assert unjudged.right_of_easy is None and unjudged.auc_of == {}


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    wrong, right = np.array([3.0, 1.0, 2.0]), np.array([0.0, 2.0, 1.0, 1.0])
    pairs = [(w > r) + (w == r) / 2 for w in wrong for r in right]
    assert auc(wrong, right) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(right, wrong) == pytest.approx(1 - auc(wrong, right)) and auc(wrong, wrong) == 0.5


# ------------------------------------------------------------------------------------------------ curve

REFERENCES: list[TokenIds] = [(1, 2, 3, 4), (5, 6, 7, 8)]


def writer(*texts: Written) -> Write:
    return lambda index: texts[index]


def test_without_a_gate_nothing_is_saved_and_all_is_equal_and_keeping_all_saves_nearly_all() -> None:
    own = writer(*(Written(each, 4, 0) for each in REFERENCES))
    half = writer(Written((1, 2, 3, 4), 2, 2), Written((5, 0, 7, 0), 2, 2))
    alone = writer(Written((9, 9, 9, 9), 0, 4), Written((5, 9, 9, 9), 1, 3))
    curve = measure_curve(
        REFERENCES, [(NO_GATE, own), ("80", half), (KEEP_ALL, alone)], lambda index, text: float(sum(text))
    )
    assert [point.calls_saved for point in curve.points] == [0.0, 0.5, 0.875]
    assert [point.share_equal for point in curve.points] == [1.0, 0.75, 0.125]
    assert [point.share_before for point in curve.points] == [1.0, 0.625, 0.125]
    assert [point.kept_share for point in curve.points] == [0.0, 0.5, 0.875]
    assert [point.target_nats for point in curve.points] == [4.5, 2.75, 8.5] and curve.cloud_only_nats == 4.5
    # Text for text against cloud-only: 0 and -3.5, 6.5 and 1.5
    errors = [point.target_nats_error for point in curve.points]
    assert errors == pytest.approx([0.0, 1.96 * 1.75, 1.96 * 2.5])


def test_texts_of_other_lengths_count_by_the_longer_one() -> None:
    short = writer(Written((1, 2), 1, 0), Written((5, 6, 7, 8, 9, 9), 1, 0))
    (point,) = measure_curve(REFERENCES, [(NO_GATE, short)], lambda index, text: None).points
    assert point.share_equal == 0.6 and point.target_nats is None


def test_a_curve_is_told_in_lines_and_as_csv() -> None:
    own = writer(*(Written(each, 4, 0) for each in REFERENCES))
    curve = measure_curve(REFERENCES, [(NO_GATE, own)], lambda index, text: None)
    lines = curve_table(curve.points, curve.cloud_only_nats).splitlines()
    assert lines[1].split() == ["no", "gate", "0.0%", "1.000", "0.0%", "100.0%", "100.0%", "-"]
    assert len({len(line) for line in lines}) == 1, "columns stand under one another"
    header, row = curve_csv(curve.points).splitlines()
    assert header.startswith("setting,num_tokens,num_calls,calls_per_token,calls_saved")
    assert row == "no gate,8,8,1.0,0.0,0.0,1.0,1.0,,"
