"""Prints text as it comes, coloured by origin on a terminal, and a summary on stderr."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any, TextIO

from outrider.common.types import FinishReason, Method, Origin
from outrider.edge_client.core.events import (
    EndEvent,
    MarkClearedEvent,
    RolledBackEvent,
    SessionEvent,
    TokenEvent,
)
from outrider.edge_client.core.unverified import buffer_unverified
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.ui.cells import row_starts, without_control_characters

_RESET = "\x1b[0m"
_COLOURS = {
    Origin.ACCEPTED: "\x1b[32m",  # green: drafted here, confirmed there
    Origin.CORRECTION: "\x1b[33m",  # yellow: the target's own instead
}
_UNVERIFIED = "\x1b[31;4m"  # red, underlined: nobody checked it


def can_redraw(out: TextIO) -> bool:
    """Returns whether written text can be redrawn: on a terminal that is not a dumb one. TERM is no setting
    of ours but a convention of terminals."""
    return out.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def readable(events: Iterator[SessionEvent], out: TextIO, is_reverified: bool) -> Iterator[SessionEvent]:
    """Returns the events as `out` can show them: where nothing can be redrawn, unverified tokens are held
    until they are verified."""
    return buffer_unverified(events) if is_reverified and not can_redraw(out) else events


class TextPrinter:
    """Prints events: on a terminal in colour (unless NO_COLOR is set), elsewhere the bare text.

    On a terminal, text that is taken back is erased and a token that is verified later changes its colour, as
    far up as the screen reaches. The text must begin in the first column.
    """

    def __init__(self, out: TextIO, has_colour: bool = True) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._is_coloured = self._is_terminal and has_colour
        self._can_redraw = can_redraw(out)
        self._pieces: list[tuple[str, str]] = []  # text and colour of each token
        self._first = 0  # token below the last remark: none before it is redrawn
        self._redraw_from: int | None = None  # the first token whose colour changed
        self._last = ""

    def show(self, event: SessionEvent | None) -> None:
        """Prints one event."""
        if not isinstance(event, MarkClearedEvent):
            self._redraw()
        match event:
            case TokenEvent():
                self._add(event.text, self._colour(event))
            case EndEvent():
                self._add(event.text, "")
            case MarkClearedEvent():
                self._pieces[event.index] = (self._pieces[event.index][0], _COLOURS[Origin.ACCEPTED])
                first = self._redraw_from
                self._redraw_from = event.index if first is None else min(first, event.index)
            case RolledBackEvent():
                self._take_back(event.num_tokens)

    def finish(self) -> None:
        """Ends the last line, if there is one."""
        self._redraw()
        if (self._last or self._is_terminal) and not self._last.endswith("\n"):
            self._out.write("\n")
        self._out.flush()

    def _add(self, text: str, colour: str) -> None:
        self._pieces.append((without_control_characters(text) if self._is_terminal else text, colour))
        self._write(*self._pieces[-1])

    def _redraw(self) -> None:
        first, self._redraw_from = self._redraw_from, None
        if first is not None and self._is_coloured and self._erase_from(first):
            for text, colour in self._pieces[first:]:
                self._write(text, colour)

    def _take_back(self, num_tokens: int) -> None:
        if not self._erase_from(num_tokens):
            self._write(f"\n[{len(self._pieces) - num_tokens} tokens above are taken back]\n", "")
            self._first = num_tokens
        del self._pieces[num_tokens:]

    def _erase_from(self, num_tokens: int) -> bool:
        """Erases all tokens but the first `num_tokens`; returns False where they begin above the screen or above a
        remark."""
        if not self._can_redraw or num_tokens < self._first:
            return False
        num_columns, num_rows = shutil.get_terminal_size()
        shown, num_kept = [text for text, _ in self._pieces[self._first :]], num_tokens - self._first
        kept_rows = row_starts("".join(shown[:num_kept]), num_columns)
        num_up = len(row_starts("".join(shown), num_columns)) - len(kept_rows)
        if num_up >= num_rows:
            return False
        self._out.write((f"\x1b[{num_up}A" if num_up else "") + "\r\x1b[J")
        num_before = 0
        for text, colour in self._pieces[self._first : num_tokens]:  # the rest of the row, in its colours
            self._write(text[max(0, kept_rows[-1] - num_before) :], colour)
            num_before += len(text)
        self._out.flush()
        return True

    def _colour(self, event: TokenEvent) -> str:
        return _COLOURS.get(event.origin, "") if event.is_verified else _UNVERIFIED

    def _write(self, text: str, colour: str) -> None:
        if not text:
            return
        self._out.write(f"{colour}{text}{_RESET}" if self._is_coloured and colour else text)
        self._out.flush()
        self._last = text


def stretch_words(stretches: Any) -> str:
    """Returns which mode made how many tokens, one after the other, of the summary's `stretches`."""
    return ", ".join(f"{each['mode']} {each['num_tokens']}" for each in stretches)


def _gate_words(stats: dict[str, Any]) -> str:
    if stats["hard_ratio"] is None:
        return ""
    calls = f"{stats['verifier_calls_per_token']:.2f} calls a token"
    if stats["num_kept_blocks"]:
        blocks = f"{stats['num_kept_blocks']} block{'s' * (stats['num_kept_blocks'] != 1)}"
        return f"gate kept {stats['num_gate_tokens']} tokens in {blocks} unasked, {calls}"
    times = f"{stats['num_escalations']} time{'s' * (stats['num_escalations'] != 1)}"
    return f"gate asked {times}, {calls}"


_ENDS = {
    FinishReason.LENGTH: "cut by --max-new-tokens",
    FinishReason.CONTEXT: "cut by the model's context",
    FinishReason.CANCELLED: "stopped by you",
}


def summary(
    result: SessionResult,
    labels: tuple[str, ...],
    seed: int,
    is_coloured: bool,
    method: Method | None = None,
) -> str:
    """Returns one or two lines about a finished text. `method` verified the drafts; None where there were
    none."""
    stats: dict[str, Any] = result.stats.summary(result.origins)
    parts = [f"{len(result.token_ids)} tokens"]
    if stats["tokens_per_s"]:
        parts.append(f"{stats['tokens_per_s']:.1f} tokens/s")
    if stats["ttft_ms"] is not None:
        parts.append(f"first after {stats['ttft_ms']:.0f} ms")
    if stats["num_rounds"]:
        parts.append(f"{stats['num_rounds']} round{'s' * (stats['num_rounds'] != 1)}")
        if stats["num_draft_tokens"]:
            accepted, drafted = stats["num_accepted_tokens"], stats["num_draft_tokens"]
            parts.append(f"{accepted} of {drafted} drafted accepted ({100 * accepted / drafted:.0f} %)")
    if len(stats["stretches"]) > 1:
        parts.append(f"modes: {stretch_words(stats['stretches'])}")
    if line := _gate_words(stats):
        parts.append(line)
    if stats["num_rolled_back_tokens"]:
        parts.append(f"{stats['num_rolled_back_tokens']} unverified tokens taken back")
    if stats["mc_dropout_ms"] is not None:
        ms, ratio = stats["mc_dropout_ms"], stats["mc_dropout_ratio"]
        parts.append(f"MC dropout {ms:.2f} ms a drafted token, {ratio:.2f} of plain drafting")
    if stats["bytes_up"]:
        parts.append(f"{stats['bytes_up']} bytes up, {stats['bytes_down']} down")
    if stats["num_learned_tokens"]:
        number, size = stats["num_learned_tokens"], stats["learn_bytes_down"]
        parts.append(f"learned from {number} tokens ({size} of the bytes down)")
    if method not in (None, Method.COUPLED):
        approximate = "" if method.is_exact else f", {sum(result.token_is_approximate)} tokens approximate"
        parts.append(f"method {method}{approximate}")
    parts.append(f"seed {seed}")
    parts.append(_ENDS.get(result.finish_reason, str(result.finish_reason)))
    lines = ["[" + " · ".join([*parts, *labels]) + "]"]
    if note := result.unverified_note:
        hint = "; `edge-client doctor` looks at the link" if stats["num_timeouts"] else ""
        lines.append(f"[{note}{hint}]")
    if is_coloured:
        lines[0] = f"\x1b[2m{lines[0]}{_RESET}"
        lines[1:] = [f"\x1b[31m{line}{_RESET}" for line in lines[1:]]
    return "\n".join(lines)
