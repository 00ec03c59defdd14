"""A terminal's screen, as far as the edge's output uses one: what a person sees, and what scrolled away."""

from __future__ import annotations

import io
import re

_CONTROL = re.compile(r"\x1b\[(\??)(\d*)(?:;\d+)*([A-Za-z])")


class Screen(io.StringIO):
    """Write to it; `rows` are on the screen, `scrolled` above it, both without blanks at their ends."""

    def __init__(self, num_columns: int = 80, num_rows: int = 24) -> None:
        super().__init__()
        self.num_columns, self.num_rows = num_columns, num_rows
        self.scrolled: list[str] = []
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        rows = ["".join(row).rstrip() for row in self._rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def all_rows(self) -> list[str]:
        return [*self.scrolled, *self.rows]

    def write(self, text: str) -> int:
        super().write(text)
        index = 0
        while index < len(text):
            if match := _CONTROL.match(text, index):
                self._control(match.group(3), match.group(2), bool(match.group(1)))
                index = match.end()
            else:
                self._put(text[index])
                index += 1
        return len(text)

    def _put(self, char: str) -> None:
        if char == "\n":
            self._down()
            self._column = 0
        elif char == "\r":
            self._column = 0
        else:
            if self._column == self.num_columns:
                self._down()
                self._column = 0
            row = self._rows[self._row]
            row += [" "] * (self._column + 1 - len(row))
            row[self._column] = char
            self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])
        if len(self._rows) > self.num_rows:
            self.scrolled.append("".join(self._rows.pop(0)).rstrip())
            self._row -= 1

    def _control(self, kind: str, number: str, is_private: bool) -> None:
        if kind == "m" or is_private:
            return
        match kind:
            case "A":
                self._row = max(0, self._row - int(number or 1))
            case "J" if not number:
                del self._rows[self._row][self._column :]
                del self._rows[self._row + 1 :]
            case "J" if number == "2":
                self._rows = [[] for _ in range(self._row + 1)]
            case "K":
                self._rows[self._row] = [] if number == "2" else self._rows[self._row][: self._column]
            case "H":
                self._row = self._column = 0
            case _:
                raise AssertionError(f"a control that this screen does not know: {number}{kind}")
