"""`run --live`, and the plain text on a terminal, where text is taken back: what a person sees in the end."""

from __future__ import annotations

import re
import threading

import pytest
from rich.console import ConsoleDimensions
from support.edge.edge_fakes import TARGET, FakeDraft, FakeVerifier, Silent, make_session
from support.screen import Screen

from outrider.common.errors import LinkError, UsageError
from outrider.common.types import FinishReason, Origin
from outrider.edge_client.commands.json_output import JsonOutput
from outrider.edge_client.commands.run import run
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)
from outrider.edge_client.core.stats import JudgedTree
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.ui.cells import row_starts
from outrider.edge_client.ui.live import LiveView, name_of, ticking
from outrider.edge_client.ui.terminal import TextPrinter

COLUMNS, ROWS = 40, 10


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("LINES", str(ROWS))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen(COLUMNS, ROWS)


@pytest.fixture
def wide(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "100")
    return Screen(100, ROWS)


class Clock:
    """Time passes at each look, so that every event is drawn."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.1
        return self.now_s


def a_session() -> EdgeSession:
    return make_session(FakeVerifier(), FakeDraft())


def make_view(screen: Screen, **given: bool) -> LiveView:
    return LiveView(a_session(), screen, clock=Clock(), **given)


def token(index: int, text: str, origin: Origin = Origin.ACCEPTED) -> TokenEvent:
    return TokenEvent(index, index, text, origin, origin.is_verified, 0)


def tokens(texts: list[str], origin: Origin = Origin.ACCEPTED, start: int = 0) -> list[SessionEvent]:
    return [token(index, text, origin) for index, text in enumerate(texts, start)]


# ------------------------------------------------------------------------------------ the live view


def test_the_status_stays_below_a_text_that_scrolls_and_the_text_is_whole_in_the_end(screen: Screen) -> None:
    view = make_view(screen)
    lines = [f"line {number} " + "x" * (3 * number % 50) for number in range(30)]
    for event in tokens([f"{line}\n" for line in lines]):
        view.show(event)
        assert "RTT" in screen.rows[-1] and "accepted" in screen.rows[-2]
        assert len(screen.rows) <= ROWS
    view.show(EndEvent(FinishReason.LENGTH))
    view.finish()
    wrapped = [line[i : i + COLUMNS] for line in lines for i in range(0, max(1, len(line)), COLUMNS)]
    assert screen.all_rows == [row.rstrip() for row in wrapped]


def test_a_line_longer_than_the_screen_scrolls_too(screen: Screen) -> None:
    view = make_view(screen)
    words = [f"word{number:03} " for number in range(120)]
    for event in tokens(words):
        view.show(event)
        assert "RTT" in screen.rows[-1] and len(screen.rows) <= ROWS
    view.finish()
    assert "".join(row.ljust(COLUMNS) for row in screen.all_rows).rstrip() == "".join(words).rstrip()


def test_text_that_is_taken_back_is_struck_through_then_gone(wide: Screen) -> None:
    view = make_view(wide, is_reverified=True)
    for event in [token(0, "kept "), *tokens(["wrong\n", "too\n"], Origin.FALLBACK, 1)]:
        view.show(event)
    assert wide.rows[:2] == ["kept wrong", "too"]
    view.show(RolledBackEvent(1, 5))
    assert "\x1b[2;9mwrong\x1b[0m" in wide.getvalue(), "dim, struck through"
    assert wide.rows[-2].endswith("taken back (2)")
    for event in tokens(["right\n", "and on"], Origin.CORRECTION, 1):
        view.show(event)
    view.finish()
    assert wide.all_rows == ["kept right", "and on"]


def test_unverified_lines_are_not_printed_for_good_unless_the_screen_is_full(screen: Screen) -> None:
    view = make_view(screen, is_reverified=True)
    view.show(token(0, "good\n"))
    for event in tokens([f"bad {number}\n" for number in range(20)], Origin.EDGE_ONLY, 1):
        view.show(event)
    view.show(RolledBackEvent(1, 5))
    for event in tokens(["right\n"], Origin.CORRECTION, 1):
        view.show(event)
    view.finish()
    assert screen.all_rows[0] == "good"
    assert any("takes the place of the end" in row for row in screen.all_rows)
    assert screen.all_rows[-1] == "right"


def test_a_change_of_size_draws_the_screen_anew(screen: Screen) -> None:
    view = make_view(screen)
    for event in tokens([f"line {number}\n" for number in range(15)]):
        view.show(event)
    view.console.size = ConsoleDimensions(30, ROWS)
    screen.num_columns = 30
    for event in tokens([f"line {number}\n" for number in range(15, 18)], start=15):
        view.show(event)
    assert [row for row in screen.rows if row.startswith("line")][-1] == "line 17"
    assert sum("RTT" in row for row in screen.rows) == 1
    view.finish()
    assert screen.rows[-1] == "line 17"


def test_each_origin_has_a_name_of_the_legend() -> None:
    names = {origin: name_of(token(0, "", origin), is_alone=False) for origin in Origin}
    assert names == {
        Origin.ACCEPTED: "accepted",
        Origin.CORRECTION: "corrected",
        Origin.BONUS: "bonus",
        Origin.TARGET: "target",
        Origin.RESENT: "target",
        Origin.GATE: "local",
        Origin.FALLBACK: "unverified",
        Origin.EDGE_ONLY: "unverified",
    }
    assert name_of(token(0, "", Origin.EDGE_ONLY), is_alone=True) == "local"


def test_what_a_model_writes_does_not_steer_the_terminal(screen: Screen) -> None:
    view = make_view(screen)
    view.show(token(0, "a\x1b[2Jb\rc\x07"))
    view.finish()
    assert screen.all_rows == ["a�[2Jb�c�"]


def test_the_view_shows_how_the_session_works(wide: Screen) -> None:
    session = make_session(FakeVerifier(script={("verify", 2): Silent()}), FakeDraft(), depth=3)
    view = LiveView(session, wide, clock=Clock())
    seen = set()
    for event in session.generate():
        view.show(event)
        seen |= set(re.findall("synchronous|alone", wide.rows[-1]))
    view.finish()
    assert seen == {"synchronous", "alone"}
    assert wide.all_rows == ["".join(f"<{token_id}>" for token_id in TARGET[2:14])]


def test_a_round_that_was_a_tree_is_shown_below_the_text_until_a_chain_follows(wide: Screen) -> None:
    session = a_session()
    view = LiveView(session, wide, text_of=lambda token_id: f"<{token_id}>", clock=Clock())
    session.result.stats.last_tree = JudgedTree((1, 2, 3), (-1, 0, -1), (0,), 9)
    view.show(token(0, "text "))
    assert wide.rows[:3] == ["text", "<1><9>", "└ <3>"] and wide.rows[3].strip() == "└ <2>"
    assert "tree 3 nodes, 1 accepted" in wide.rows[-1]
    session.result.stats.last_tree = None
    view.show(token(1, "more"))
    assert wide.rows[0] == "text more" and "tree" not in wide.rows[-1]
    view.finish()
    assert wide.all_rows == ["text more"]


def test_a_low_screen_keeps_its_rows_for_the_text(screen: Screen) -> None:
    screen.num_rows = 5
    view = LiveView(session := a_session(), screen, clock=Clock())
    view._size = ConsoleDimensions(COLUMNS, 5)
    session.result.stats.last_tree = JudgedTree((1, 2, 3), (-1, 0, -1), (0,), 9)
    assert view._tree_rows() == []
    view.finish()


def test_ticks_come_between_events_and_errors_after_them() -> None:
    has_ticked = threading.Event()

    def events():  # type: ignore[no-untyped-def]
        yield token(0, "a")
        assert has_ticked.wait(60)
        raise LinkError("gone")

    got = []
    with pytest.raises(LinkError, match="gone"):
        for event in ticking(events(), 0.005):
            got.append(event)
            if event is None:
                has_ticked.set()
    assert got[0] == token(0, "a") and None in got[1:]


def test_live_and_json_are_refused_together() -> None:
    with pytest.raises(UsageError, match="--live and --json do not go together"):
        run(RunConfig(), "x", None, JsonOutput(), True)


# ------------------------------------------------------------------------------------ the plain text


def test_plain_text_is_erased_where_it_is_taken_back(screen: Screen) -> None:
    printer = TextPrinter(screen)
    text = "a first line\nthen one that is longer than forty columns, so that it wraps "
    for event in tokens([*re.findall(r"\S+\s", text)]):
        printer.show(event)
    num_kept = len(re.findall(r"\S+\s", text))
    wrong = ["which the draft\n", "wrote\n", "by itself over some rows of the screen"]
    for event in tokens(wrong, Origin.FALLBACK, num_kept):
        printer.show(event)
    printer.show(RolledBackEvent(num_kept, len(text)))
    for event in tokens(["and ", "ends.\n"], Origin.CORRECTION, num_kept):
        printer.show(event)
    printer.finish()
    assert screen.all_rows == [
        "a first line",
        "then one that is longer than forty colum",
        "ns, so that it wraps and ends.",
    ]


def test_what_scrolled_away_is_said_to_be_taken_back(screen: Screen) -> None:
    printer = TextPrinter(screen)
    for event in [token(0, "kept\n"), *tokens(["wrong\n"] * 20, Origin.FALLBACK, 1)]:
        printer.show(event)
    printer.show(RolledBackEvent(1, 5))
    printer.show(token(1, "right\n", Origin.CORRECTION))
    assert screen.rows[-2:] == ["[20 tokens above are taken back]", "right"]


def test_what_is_taken_back_after_that_is_erased_where_it_stands(screen: Screen) -> None:
    printer = TextPrinter(screen)
    kept = "kept, up to the middle of the row "
    for event in [token(0, kept), *tokens(["wrong\n"] * 20, Origin.FALLBACK, 1)]:
        printer.show(event)
    printer.show(RolledBackEvent(1, len(kept)))
    for event in [token(1, "right, "), token(2, "wrong again", Origin.FALLBACK)]:
        printer.show(event)
    printer.show(RolledBackEvent(2, len(kept) + 7))
    printer.show(token(2, "as before", Origin.CORRECTION))
    assert screen.rows[-2:] == ["[20 tokens above are taken back]", "right, as before"]
    printer.show(RolledBackEvent(0, 0))
    assert screen.rows[-2:] == ["right, as before", "[3 tokens above are taken back]"]


def test_a_mark_that_went_changes_the_colour(screen: Screen) -> None:
    printer = TextPrinter(screen)
    for event in [token(0, "a "), token(1, "b "), MarkClearedEvent(0), *tokens(["c"], Origin.FALLBACK, 2)]:
        printer.show(event)
    before = screen.getvalue()
    printer.show(MarkClearedEvent(2))
    printer.finish()
    assert "\x1b[31;4mc\x1b[0m" in before
    green = "".join(f"\x1b[32m{text}\x1b[0m" for text in ("a ", "b ", "c"))
    assert screen.getvalue().endswith(f"\r\x1b[J{green}\n")
    assert screen.all_rows == ["a b c"]


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("", [0]),
        ("abcd", [0]),
        ("abcde", [0, 4]),
        ("ab\ncd\n", [0, 3, 6]),
        ("abcd\nx", [0, 5]),
        ("日本x", [0, 2]),
        ("a日本", [0, 2]),
        ("e\u0301e\u0301e\u0301e\u0301", [0]),
        ("a\tb", [0]),
    ],
)
def test_rows_break_as_a_terminal_of_four_columns_breaks_them(text: str, starts: list[int]) -> None:
    assert row_starts(text, 4) == starts
