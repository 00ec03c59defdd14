"""Prompt lookup against its definition written naively, and opening it from a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_dirs import edit_json, make_hf_dir, write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.common.errors import InvalidFieldError, ModelError, UsageError
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.copying.prompt_lookup import PromptLookupModel
from outrider.edge_client.drafting.copying.sequence import CopySequence
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.drafting.registry import CopySettings, create_draft_model


def make_sequence(text: list[int], max_ngram: int = 4, num_tokens: int = 100) -> CopySequence:
    sequence = PromptLookupModel(num_tokens, "", max_ngram=max_ngram).sequence(SamplingParams())
    sequence.commit(text)
    return sequence


def naive_proposal(text: list[int], max_ngram: int, num_draft_tokens: int) -> tuple[int, ...]:
    for n in range(min(max_ngram, len(text)), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                grown = list(text)
                for index in range(num_draft_tokens):
                    grown.append(grown[end + index])
                return tuple(grown[len(text) :])
    return ()


def test_what_followed_the_last_tokens_is_proposed_with_certainty() -> None:
    draft = make_sequence([1, 2, 3, 4, 5, 9, 2, 3]).propose(3)
    assert (draft.token_ids, draft.draft_probs) == ((4, 5, 9), (1.0, 1.0, 1.0))


def test_a_longer_match_wins_over_a_more_recent_one_and_the_most_recent_of_equals_wins() -> None:
    assert make_sequence([1, 2, 7, 5, 2, 8, 5, 1, 2]).propose(1).token_ids == (7,)
    assert make_sequence([1, 2, 7, 5, 1, 2, 8, 5, 1, 2]).propose(1).token_ids == (8,)
    assert make_sequence([1, 2, 7, 5, 2, 8, 5, 1, 2], max_ngram=1).propose(1).token_ids == (8,)


def test_a_repetition_is_proposed_as_often_as_it_fits() -> None:
    assert make_sequence([7, 7]).propose(4).token_ids == (7, 7, 7, 7)
    assert make_sequence([9, 1, 2, 1, 2]).propose(5).token_ids == (1, 2, 1, 2, 1)


def test_without_a_match_nothing_is_proposed() -> None:
    assert make_sequence([1, 2, 3, 4]).propose(4).token_ids == ()
    assert make_sequence([5]).propose(4).token_ids == ()


def test_ids_past_the_tokenizer_are_refused() -> None:
    sequence = make_sequence([1, 2])
    with pytest.raises(InvalidFieldError, match="100"):
        sequence.commit([3, 100])
    assert sequence.position == 2


Step = tuple[str, list[int], int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "correct", "truncate"]),
        st.lists(st.integers(0, 3), max_size=6),
        st.integers(0, 40),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, max_ngram=st.integers(1, 6), num_draft_tokens=st.integers(0, 9))
def test_under_any_commits_corrections_and_rollbacks_it_proposes_what_its_definition_says(
    steps: list[Step], max_ngram: int, num_draft_tokens: int
) -> None:
    text = [0]
    sequence = make_sequence(text, max_ngram)
    for action, token_ids, number in steps:
        if action == "truncate":
            text = text[: max(1, number % (len(text) + 1))]
            sequence.truncate(len(text))
        elif action == "correct":  # a verdict: some of the proposal stands, then another token
            token_ids = [*sequence.propose(num_draft_tokens).token_ids[: number % 9], number % 4]
        if action != "truncate":
            text = text + token_ids
            sequence.commit(token_ids)
        assert sequence.position == len(text)
        expected = naive_proposal(text, max_ngram, num_draft_tokens)
        assert sequence.propose(num_draft_tokens).token_ids == expected
    sequence.check_integrity()


# ----------------------------------------------------------------------------------------- opening


def test_a_tokenizer_is_all_it_needs(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 50)
    with create_draft_model("prompt-lookup", tmp_path, copies=CopySettings(max_ngram=2)) as model:
        assert (model.num_tokens, model.eos_token_ids) == (50, ())
        sequence = model.sequence(SamplingParams())
        sequence.commit([4, 5, 4])
        assert sequence.propose(1).token_ids == (5,)


def test_it_knows_the_tokenizer_and_end_of_text_of_what_lies_beside(tmp_path: Path) -> None:
    hf_dir = make_hf_dir(tmp_path / "hf", "llama")
    export_draft(hf_dir, tmp_path / "draft")
    with OnnxDraftModel.open(tmp_path / "draft") as drafted:
        known = (drafted.tokenizer_fingerprint, drafted.num_tokens, (3,))
    for directory in (hf_dir, tmp_path / "draft"):
        model = create_draft_model("prompt-lookup", directory)
        assert (model.tokenizer_fingerprint, model.num_tokens, model.eos_token_ids) == known
    others = [
        create_draft_model("prompt-lookup", hf_dir, copies=CopySettings(max_ngram=n)).fingerprint
        for n in (4, 5)
    ]
    assert others[0] == model.fingerprint != others[1]


def test_a_directory_it_cannot_use_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        create_draft_model("prompt-lookup", tmp_path)
    export_draft(make_hf_dir(tmp_path / "hf", "llama"), tmp_path / "draft")
    edit_json(tmp_path / "draft" / "draft.json", eos_token_ids=None)
    with pytest.raises(ModelError, match=r"draft\.json cannot be read"):
        create_draft_model("prompt-lookup", tmp_path / "draft")
    with pytest.raises(UsageError, match="at least one token, not 0"):
        create_draft_model("prompt-lookup", tmp_path, copies=CopySettings(max_ngram=0))
