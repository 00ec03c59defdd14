"""Shows `edge-client run --live`: the text coloured by origin, above a line of measurements and, where rounds are
trees, the last one.

Only the end of the text is redrawn: lines that cannot change any more are printed and scroll away. Text that
was taken back is struck through for a moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from outrider.common.types import Origin
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)
from outrider.edge_client.core.live_stats import LiveStats
from outrider.edge_client.session.session import EdgeSession
from outrider.edge_client.ui.cells import row_starts, without_control_characters
from outrider.edge_client.ui.tree_rows import tree_rows

_TICK_S = 0.08
_STRUCK_S = 1.2  # how long what was taken back stays
_RECENT_S = 5.0  # tokens of so long make the rate
_STYLES = {
    "accepted": "green",
    "corrected": "yellow",
    "bonus": "cyan",
    "target": "",
    "local": "magenta",
    "unverified": "red underline",
}
_STRUCK = "dim strike"
_NAME_OF = {Origin.ACCEPTED: "accepted", Origin.CORRECTION: "corrected", Origin.BONUS: "bonus"}
_DOUBTFUL = ("local", "unverified")
_NUM_ROWS_BELOW = 2  # legend and status
_MAX_TREE_ROWS = 6  # more of them, where the last round was a tree; a third of a low screen


def name_of(event: TokenEvent, is_alone: bool) -> str:
    """Returns a token's name in the legend. `local` was kept by the edge as configured (commit-gate, mode
    edge-only), `unverified` because the link failed."""
    if event.is_verified:
        return _NAME_OF.get(event.origin, "target")
    return "local" if is_alone or event.origin is Origin.GATE else "unverified"


def ticking(events: Iterator[SessionEvent], seconds: float = _TICK_S) -> Iterator[SessionEvent | None]:
    """Yields the events, and None after each `seconds` without one. A thread of its own makes them; its
    exceptions are raised here."""
    queue: SimpleQueue[SessionEvent | Exception | None] = SimpleQueue()

    def run() -> None:
        try:
            for event in events:
                queue.put(event)
            queue.put(None)
        except Exception as error:
            queue.put(error)

    threading.Thread(target=run, name="edge-generation", daemon=True).start()
    while True:
        try:
            item = queue.get(timeout=seconds)
        except Empty:
            yield None
            continue
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


class LiveView:
    """Draws a session's events as `ticking` yields them, until `finish`. `is_reverified` says that unverified
    text may be taken back, `text_of` gives the text of a drafted token."""

    def __init__(
        self,
        session: EdgeSession,
        out: TextIO,
        has_colour: bool = True,
        *,
        text_of: Callable[[int], str] = str,
        is_alone: bool = False,
        is_reverified: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = Console(file=out, highlight=False, no_color=None if has_colour else True)
        self._session = session
        self._stats = LiveStats(session.result.stats)
        self._text_of, self._is_alone, self._is_reverified = text_of, is_alone, is_reverified
        self._clock = clock
        self._pieces: list[tuple[str, str]] = []  # text and name of each token
        self._first, self._num_cut = 0, 0  # the tail's first token, and characters of it that are printed
        self._struck: tuple[int, str, float] | None = None  # before which token, what, until when
        self._num_taken_back = 0
        self._drawn_s = 0.0
        self._tree: list[Text] = []  # the last round, where it was one
        self._size = self.console.size
        self._live = self._start()

    # ------------------------------------------------------------------------------------- events

    def show(self, event: SessionEvent | None) -> None:
        """Draws one event, or only the passing of time."""
        match event:
            case TokenEvent():
                self._pieces.append((without_control_characters(event.text), name_of(event, self._is_alone)))
            case EndEvent():
                self._pieces.append((without_control_characters(event.text), "target"))
            case MarkClearedEvent():
                self._pieces[event.index] = (self._pieces[event.index][0], "accepted")
            case RolledBackEvent():
                self._take_back(event.num_tokens)
        now_s = self._clock()
        if now_s - self._drawn_s >= _TICK_S:
            self._drawn_s = now_s
            self._draw()

    def finish(self) -> None:
        """Leaves the text alone on the screen, also after an error or a Ctrl-C."""
        self._struck = None
        self._live.stop()
        rest = self._tail()
        if rest.plain:
            self.console.print(rest, soft_wrap=True, end="" if rest.plain.endswith("\n") else "\n")

    def _take_back(self, num_tokens: int) -> None:
        taken = "".join(text for text, _ in self._pieces[num_tokens:])
        self._num_taken_back += len(self._pieces) - num_tokens
        del self._pieces[num_tokens:]
        if num_tokens < self._first or (num_tokens == self._first and self._num_cut):
            self._first, self._num_cut = num_tokens, 0  # some of it is printed already
            self.console.print(Text("[what follows takes the place of the end above]", style="dim"))
        self._struck = (num_tokens, taken, self._clock() + _STRUCK_S)

    # ------------------------------------------------------------------------------------ drawing

    def _start(self) -> Live:
        live = Live(self, console=self.console, auto_refresh=False, transient=True)
        live.start()
        return live

    def _draw(self) -> None:
        if self._struck is not None and self._clock() > self._struck[2]:
            self._struck = None
        if self.console.size != self._size:
            self._redraw_all()
        self._tree = self._tree_rows()
        self._print_settled()
        self._live.refresh()

    def _redraw_all(self) -> None:
        self._size = self.console.size
        self._live.stop()
        self.console.clear()
        printed = Text.assemble(*((text, _STYLES[name]) for text, name in self._pieces[: self._first]))
        if self._num_cut:
            text, name = self._pieces[self._first]
            printed.append(text[: self._num_cut], _STYLES[name])
        starts = row_starts(printed.plain, self._size.width)
        last_rows = printed[starts[-min(len(starts), self._size.height)] :]
        self.console.print(last_rows, soft_wrap=True, end="" if last_rows.plain.endswith("\n") else "\n")
        self._live = self._start()

    def _print_settled(self) -> None:
        """Prints lines that cannot change any more, and the upper rows of what does not fit the screen."""
        tail = self._tail()
        end = tail.plain.rfind("\n", 0, self._num_settled()) + 1
        starts = row_starts(tail.plain[end:], self._size.width)
        num_over = len(starts) - max(1, self._size.height - self._num_rows_below - 1)
        if num_over > 0:
            end += starts[num_over]
        if end:
            lines = tail[:end]
            self._mark_printed(end)
            self.console.print(lines, soft_wrap=True, end="" if lines.plain.endswith("\n") else "\n")

    def _mark_printed(self, num_chars: int) -> None:
        self._num_cut += num_chars
        while self._first < len(self._pieces) and self._num_cut >= len(self._pieces[self._first][0]):
            self._num_cut -= len(self._pieces[self._first][0])
            self._first += 1

    def _num_settled(self) -> int:
        """Returns how many characters of the tail come before the first that may be taken back or is struck
        through."""
        tail = self._pieces[self._first :]
        number = len(tail)
        if self._is_reverified:
            number = next((i for i, (_, name) in enumerate(tail) if name in _DOUBTFUL), number)
        if self._struck is not None:
            number = min(number, self._struck[0] - self._first)
        return max(0, sum(len(text) for text, _ in tail[:number]) - self._num_cut)

    def _tail(self) -> Text:
        pieces = [(text, _STYLES[name]) for text, name in self._pieces[self._first :]]
        if self._num_cut and pieces:
            pieces[0] = (pieces[0][0][self._num_cut :], pieces[0][1])
        return Text.assemble(*pieces)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tail = self._tail()
        if self._struck is not None:
            at = sum(len(text) for text, _ in self._pieces[self._first : self._struck[0]]) - self._num_cut
            tail = Text.assemble(tail[:at], (self._struck[1], _STRUCK), tail[at:])
        rows = tail.divide(row_starts(tail.plain, options.max_width)[1:])
        for row in rows[-max(1, options.size.height - self._num_rows_below) :]:
            if row.plain.endswith("\n"):
                row.right_crop(1)
            yield row
        for line in (*self._tree, self._legend(), self._status()):
            line.truncate(options.max_width, overflow="ellipsis")
            yield line

    @property
    def _num_rows_below(self) -> int:
        return _NUM_ROWS_BELOW + len(self._tree)

    def _tree_rows(self) -> list[Text]:
        num_rows = min(_MAX_TREE_ROWS, self._size.height // 3)
        tree = self._stats.last_tree
        if tree is None or num_rows < 2:
            return []
        return tree_rows(tree, self._text_of, num_rows, self._size.width)

    def _legend(self) -> Text:
        line = Text(" ").join(Text(name, style) for name, style in _STYLES.items())
        if self._num_taken_back:
            line.append(f" taken back ({self._num_taken_back})", _STRUCK)
        return line

    def _status(self) -> Text:
        live = self._stats
        live.update()
        parts = [
            f"RTT {_shown(live.rtt_ms, '.0f')} ms",
            _drafted(live),
            f"accepted {_shown(live.acceptance_rate, '.0%')}",
            self._session.way,
            f"{_shown(live.calls_per_token, '.2f')} calls/token",
            f"{_shown(live.recent_tokens_per_s(_RECENT_S), '.0f')} tokens/s",
        ]
        return Text("  ".join(parts), style="reverse")


def _drafted(live: LiveStats) -> str:
    """Returns what the last round drafted."""
    if (tree := live.last_tree) is not None:
        return f"tree {len(tree.token_ids)} nodes, {len(tree.accepted_nodes)} accepted"
    return f"depth {_shown(live.draft_length, 'd')}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
