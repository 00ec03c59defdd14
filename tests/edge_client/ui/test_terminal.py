"""What a person sees."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from support.edge.edge_fakes import TARGET, FakeDraft, FakeVerifier, Silent, make_session

from outrider.common.types import FinishReason
from outrider.edge_client.core.events import EndEvent
from outrider.edge_client.ui.terminal import TextPrinter, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(out: io.StringIO, has_colour: bool = True) -> str:
    draft = FakeDraft([*TARGET[:8], 99, *TARGET[9:]])
    session = make_session(FakeVerifier(script={("verify", 1): Silent()}), draft, depth=2, max_new_tokens=8)
    printer = TextPrinter(out, has_colour)
    for event in session.generate():
        printer.show(event)
    printer.finish()
    show.result = session.result  # type: ignore[attr-defined]
    return out.getvalue()


def test_accepted_corrected_and_unverified_text_differ_in_colour() -> None:
    text = show(Terminal())
    assert "<10>" in text
    assert "\x1b[31;4m<11>\x1b[0m" in text  # fallback
    assert "\x1b[32m<12>\x1b[0m" in text  # accepted
    assert "\x1b[33m<16>\x1b[0m" in text  # corrected
    assert text.endswith("\n")


def test_without_a_terminal_the_text_is_bare_and_ends_its_line() -> None:
    assert show(io.StringIO()) == "<10><11><12><13><14><15><16><17>\n"
    nothing = io.StringIO()
    TextPrinter(nothing).finish()
    assert nothing.getvalue() == ""


@pytest.mark.parametrize(
    ("out", "shown"), [(Terminal(), "a\ufffd[2Jb\tc\n"), (io.StringIO(), "a\x1b[2Jb\tc\n")]
)
def test_a_model_cannot_steer_the_terminal(out: io.StringIO, shown: str) -> None:
    TextPrinter(out).show(EndEvent(FinishReason.STOP, "a\x1b[2Jb\tc\n"))
    assert out.getvalue() == shown


def test_no_color_is_heeded() -> None:
    assert show(Terminal(), has_colour=False) == "<10><11><12><13><14><15><16><17>\n"


def test_the_summary_counts_what_nobody_verified() -> None:
    show(io.StringIO())
    lines = summary(show.result, ("min-draft-ms=5",), 7, is_coloured=False).splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("[8 tokens · ") and "seed 7" in lines[0] and "min-draft-ms=5" in lines[0]
    says = "[1 of 8 tokens are the draft's own, unverified: no answer came in time; "
    assert lines[1] == says + "`edge-client doctor` looks at the link]"


def test_the_summary_says_in_words_why_the_text_ended() -> None:
    show(io.StringIO())
    result = show.result  # type: ignore[attr-defined]
    for reason, words in (
        (FinishReason.STOP, "stop"),
        (FinishReason.LENGTH, "cut by --max-new-tokens"),
        (FinishReason.CONTEXT, "cut by the model's context"),
        (FinishReason.CANCELLED, "stopped by you"),
    ):
        ended = replace(result, finish_reason=reason)
        assert summary(ended, (), 7, is_coloured=False).splitlines()[0].endswith(f" · {words}]")
