"""How text looks on a terminal: what of it may be written there, and how it breaks into rows, so that the end
of it can be written anew. Pure."""

from __future__ import annotations

import unicodedata

_TAB = 8


def row_starts(text: str, num_columns: int) -> list[int]:
    """The index of the character that each row begins with; the text begins in the first column.

    A row that is just full wraps with the next character, as terminals do.
    """
    starts, column = [0], 0
    for index, char in enumerate(text):
        if char == "\n":
            starts.append(index + 1)
            column = 0
            continue
        if char == "\t":
            column = min(num_columns - 1, (column // _TAB + 1) * _TAB)
            continue
        width = _width(char)
        if column + width > num_columns:
            starts.append(index)
            column = 0
        column += width
    return starts


def unsteering(text: str) -> str:
    """What a model writes must not steer the terminal: no control characters but line ends and tabs."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 159 else "\ufffd" for c in text)


def _width(char: str) -> int:
    if char < "\x7f":
        return char >= " "
    if unicodedata.category(char) in ("Cc", "Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
