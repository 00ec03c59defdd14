"""Where a text ends does not depend on how it is cut into tokens."""

import codecs
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.common.errors import InvalidFieldError
from outrider.common.stopping import Step, TextStopper, check_stop_params, first_stop, stop_ids
from outrider.common.types import FinishReason, StopParams

EOS = 0
letters = st.text("abc", max_size=24)


class ByteTokens:
    """Each token is some bytes of UTF-8; text becomes final when a character is complete."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, token_id):
        return self.decoder.decode(self.pieces[token_id - 1])


def run(pieces, **stop):
    """Push tokens 1, 2, ... (`pieces`) until the end; return (text, finish, tokens taken, parts)."""
    stopper = TextStopper(StopParams(**stop), [EOS], ByteTokens(pieces))
    shown = []
    for token_id in range(1, len(pieces) + 1):
        step = stopper.push(token_id)
        shown.append(step.text)
        if step.finish:
            return "".join(shown), step.finish, token_id, shown
    return "".join(shown) + stopper.flush(), None, len(pieces), shown


def cut(data, content):
    """Cut bytes at random places into non-empty pieces."""
    if not content:
        return []
    places = sorted(data.draw(st.sets(st.integers(1, max(len(content) - 1, 1)), max_size=len(content))))
    bounds = [0, *[place for place in places if place < len(content)], len(content)]
    return [content[a:b] for a, b in itertools.pairwise(bounds)]


def reference(text, stop_strings, first_end=1):
    """Character by character: the first stop string completed from `first_end` on, the longest of those, ends it."""
    for end in range(first_end, len(text) + 1):
        starts = [end - len(s) for s in stop_strings if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)], end
    return text, None


@settings(max_examples=300, deadline=None)
@given(letters, st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), st.data())
def test_cutting_the_text_into_other_tokens_changes_neither_text_nor_end(text, stop_strings, data):
    pieces = cut(data, text.encode())
    expected, end = reference(text, stop_strings)
    got, finish, num_taken, _ = run(pieces, max_new_tokens=100, stop_strings=tuple(stop_strings))
    assert got == expected
    assert finish == (FinishReason.STOP if end else None)
    if end:  # the last token taken is the one that completes the stop string
        taken = sum(map(len, pieces[:num_taken]))
        assert taken - len(pieces[num_taken - 1]) < end <= taken


@settings(max_examples=300, deadline=None)
@given(
    letters,
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 8),
    st.data(),
)
def test_the_first_tokens_complete_no_stop_string_where_so_many_are_wanted(text, stop_strings, number, data):
    pieces = cut(data, text.encode())
    expected, end = reference(text, stop_strings, sum(map(len, pieces[:number])) + 1)
    got, finish, num_taken, _ = run(
        pieces, max_new_tokens=100, stop_strings=tuple(stop_strings), min_new_tokens=number
    )
    assert (got, finish) == (expected, FinishReason.STOP if end else None)
    assert not end or num_taken > number


@settings(max_examples=200, deadline=None)
@given(
    st.text("é€😀ab", max_size=12), st.lists(st.text("é€😀a", min_size=1, max_size=3), max_size=2), st.data()
)
@example("a😀", ["😀"], None)
def test_tokens_may_end_inside_a_character(text, stop_strings, data):
    content = text.encode()
    pieces = cut(data, content) if data else [bytes([byte]) for byte in content]
    got, _, _, shown = run(pieces, max_new_tokens=100, stop_strings=tuple(stop_strings))
    assert got == reference(text, stop_strings)[0]
    assert "\ufffd" not in "".join(shown)


@settings(max_examples=200, deadline=None)
@given(letters, st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_shown_text_is_never_taken_back_and_no_more_is_held_than_needed(text, stop_strings, data):
    pieces = cut(data, text.encode())
    final, _, _, shown = run(pieces, max_new_tokens=100, stop_strings=tuple(stop_strings))
    so_far = ""
    for index, part in enumerate(shown[:-1]):
        so_far += part
        assert final.startswith(so_far)
        held = b"".join(pieces[: index + 1]).decode()[len(so_far) :]
        assert not held or any(s.startswith(held) for s in stop_strings)


def test_a_stop_string_over_several_tokens_ends_the_text_before_it():
    assert run([b"def f", b"():\n", b"\nde", b"f g"], stop_strings=("\n\ndef",)) == (
        "def f():",
        FinishReason.STOP,
        4,
        ["def f", "():", "", ""],
    )


def test_text_held_back_is_shown_when_it_turns_out_harmless_or_generation_ends():
    stopper = TextStopper(StopParams(max_new_tokens=9, stop_strings=("END",)), [EOS], lambda i: "EN!"[i - 1])
    steps = [stopper.push(i) for i in (1, 2, 3)]
    assert [(step.text, step.num_chars) for step in steps] == [("", 1), ("", 1), ("EN!", 1)]
    stopper.push(1)
    assert stopper.push(EOS) == Step("E", FinishReason.STOP)


def test_the_callers_own_end_releases_held_text_once():
    stopper = TextStopper(StopParams(stop_strings=("ab",)), [EOS], lambda i: "a")
    assert (stopper.push(1).text, stopper.flush(), stopper.flush()) == ("", "a", "")


def test_the_length_limit_counts_every_token_and_releases_held_text():
    assert run([b"a", b"b", b"c"], max_new_tokens=2, stop_strings=("bcd",)) == (
        "ab",
        FinishReason.LENGTH,
        2,
        ["a", "b"],
    )


def test_a_stop_with_the_last_allowed_token_is_a_stop():
    assert run([b"a", b"b"], max_new_tokens=2, stop_strings=("b",))[:2] == ("a", FinishReason.STOP)
    stopper = TextStopper(StopParams(max_new_tokens=1), [EOS], lambda i: "?")
    assert stopper.push(EOS) == Step("", FinishReason.STOP)


def test_stop_ids_and_ignored_end_of_text_show_nothing():
    stop = StopParams(stop_token_ids=(7,), ignore_eos=True)
    stopper = TextStopper(stop, [EOS], lambda i: f"<{i}>")
    assert [stopper.push(i) for i in (EOS, 3, 7)] == [Step(""), Step("<3>"), Step("", FinishReason.STOP)]
    with pytest.raises(AssertionError, match="after the end"):
        stopper.push(1)


def test_an_ignored_end_of_text_is_shown_where_special_tokens_are():
    stop = StopParams(stop_token_ids=(7,), ignore_eos=True, shows_special_tokens=True)
    stopper = TextStopper(stop, [EOS, 7], lambda i: f"<{i}>")
    expected = [Step(f"<{EOS}>"), Step("<3>"), Step("", FinishReason.STOP)]
    assert [stopper.push(i) for i in (EOS, 3, 7)] == expected
    ending = TextStopper(StopParams(shows_special_tokens=True), [EOS], lambda i: f"<{i}>")
    assert ending.push(EOS) == Step("", FinishReason.STOP)


def test_stop_ids_leave_end_of_text_out_when_it_is_ignored():
    assert stop_ids(StopParams(stop_token_ids=(7,)), [0, 2]) == {0, 2, 7}
    assert stop_ids(StopParams(stop_token_ids=(7,), ignore_eos=True), [0, 2]) == {7}
    assert first_stop([5, 7, 0], {0, 7}) == 1
    assert first_stop([5, 6], {0, 7}) is None


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        (StopParams(max_new_tokens=0), "max_new_tokens"),
        (StopParams(stop_token_ids=(100,)), "stop_token_ids"),
        (StopParams(stop_strings=("a", "")), "stop_strings"),
    ],
)
def test_stop_values_out_of_range_are_named(stop, field):
    with pytest.raises(InvalidFieldError) as caught:
        check_stop_params(stop, 100)
    assert caught.value.field == field
