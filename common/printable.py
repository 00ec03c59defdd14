"""Text that others choose (names, messages, paths), made fit for a terminal and a log."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Returns `text` on one line and without control characters, which could move the cursor or hide text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
