"""A result in a notebook: each token coloured by its origin, nothing of the text taken for HTML."""

from __future__ import annotations

from dataclasses import replace

from outrider.common.types import FinishReason, Origin
from outrider.edge_client.library.result import Result, _split

RESULT = Result(
    text="if a<b & c:\n",
    ids=(5, 6, 7),
    origins=(Origin.TARGET, Origin.ACCEPTED, Origin.FALLBACK),
    is_verified=(True, True, False),
    pieces=("if ", "a<b", " & c:\n"),
    finish_reason=FinishReason.LENGTH,
    seed=3,
    exact=False,
    usage={},
)


def test_tokens_are_coloured_by_origin_and_text_is_escaped() -> None:
    assert RESULT._repr_html_() == (
        '<pre style="white-space:pre-wrap"><span title="target" style="">if </span>'
        '<span title="accepted" style="color:#2f9e5b">a&lt;b</span>'
        '<span title="fallback, unverified" style="color:#e03131;text-decoration:underline"> &amp; c:\n</span></pre>'
        "<small>3 tokens · 1 accepted · 1 target · 1 fallback · not exact · seed 3</small>"
    )
    assert str(RESULT) == "if a<b & c:\n"


def test_a_result_without_tokens_is_neither_exact_nor_not() -> None:
    empty = replace(RESULT, text="", ids=(), origins=(), is_verified=(), pieces=(), exact=None)
    assert empty._repr_html_() == ('<pre style="white-space:pre-wrap"></pre><small>0 tokens · seed 3</small>')


def test_pieces_are_the_text_where_a_stop_string_cut_it_and_where_a_character_is_incomplete() -> None:
    texts = {1: "ab", 2: "", 3: "cd"}
    assert _split("abc", (1, 2, 3), texts.__getitem__) == ("ab", "", "c")
    assert _split("ab\ufffd", (1, 2), texts.__getitem__) == ("ab", "\ufffd")
    assert _split("", (), texts.__getitem__) == ()
