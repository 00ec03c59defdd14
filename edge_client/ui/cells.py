"""Cuts text into the rows that a terminal shows it in, and removes the characters that would control it."""

from __future__ import annotations

_TAB = 8


def row_starts(text: str, num_columns: int) -> list[int]:
    """Returns the index of the character that each row begins with; the text begins in the first column.

    A row that is just full wraps with the next character, as terminals do.
    """
    from wcwidth import wcwidth  # takes 0.1 s to import, and most runs never redraw

    starts, column = [0], 0
    for index, char in enumerate(text):
        if char == "\n":
            starts.append(index + 1)
            column = 0
            continue
        if char == "\t":
            column = min(num_columns - 1, (column // _TAB + 1) * _TAB)
            continue
        width = max(0, wcwidth(char))  # -1 for a control character, which shows nothing
        if column + width > num_columns:
            starts.append(index)
            column = 0
        column += width
    return starts


def without_control_characters(text: str) -> str:
    """Returns the text without control characters but line ends and tabs, so that no model's output can
    control the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 159 else "\ufffd" for c in text)
