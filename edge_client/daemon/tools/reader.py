"""Reads tool calls out of an answer's text as it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from outrider.edge_client.daemon.tools.families import ToolFamily

_MAX_HEADER_CHARS = 256  # from a call's brace to that of its arguments; tools' names have at most 64


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Holds the next piece of an answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Holds the next piece of a call's arguments; the first of a call has its `call_id` and `name`."""

    index: int
    arguments: str
    call_id: str = ""
    name: str = ""


Delta = TextDelta | CallDelta
_Step = Callable[["CallReader"], bool]


class CallReader:
    """Splits an answer into content and calls of the given tools, at most `max_calls`; the result does not depend on
    how the text is cut into pieces, but for the pieces themselves.

    What only looks like a call stays content: another tool's name, or JSON of another form. White space beside calls
    belongs to neither, nor does the beginning of a call that the text's end cut, where it is forced or after another.
    """

    def __init__(
        self, family: ToolFamily, names: Collection[str], max_calls: int, is_forced: bool = False
    ) -> None:
        """Where calls are `is_forced`, the text is nothing else."""
        self.num_calls = 0
        self._family, self._names, self._max_calls = family, names, max_calls
        self._is_forced = is_forced
        self._rest = ""  # not read yet
        self._step: _Step = CallReader._find if family.opening else CallReader._begin
        self._made: list[Delta] = []
        self._scanner = _ObjectScanner()
        self._is_after_call = False  # and white space has followed it alone
        self._opened = ""  # text since the opening, which is content where no call follows

    def feed(self, text: str) -> list[Delta]:
        """Takes the next piece of text; returns what is known now."""
        self._rest += text
        while self._step(self):
            pass
        return self._taken()

    def end(self) -> list[Delta]:
        """Returns what was held back, once the text has ended."""
        if self._is_forced or self.num_calls:
            self._drop_beginning()
        elif self._step is CallReader._read_header:
            self._rest = self._opened + self._rest
        if self._step in (CallReader._find, CallReader._begin, CallReader._read_header, CallReader._plain):
            text = self._rest if not self.num_calls else self._rest.rstrip()
            self._put_text(text)
        self._rest = ""
        return self._taken()

    def _drop_beginning(self) -> None:
        """Leaves out what is held back as the beginning of a call."""
        if self._step is CallReader._read_header:
            self._rest = ""
        elif self._step is CallReader._find:
            self._rest = self._rest[: len(self._rest) - self._num_held(self._rest)]

    def _num_held(self, text: str) -> int:
        """Returns how many characters at the end of `text` may begin an opening."""
        opening = self._family.opening
        return next(n for n in range(len(opening) - 1, -1, -1) if text.endswith(opening[:n]))

    def _taken(self) -> list[Delta]:
        made, self._made = self._made, []
        return made

    def _put_text(self, text: str) -> None:
        if text:
            self._made.append(TextDelta(text))

    # Each step reads some of `_rest`; it returns whether there may be more to read.

    def _begin(self) -> bool:
        """Decides by the first character whether the whole text is a call."""
        start = self._rest.lstrip()
        if not start:
            return False
        self._step = CallReader._read_header if start[0] == "{" else CallReader._plain
        return True

    def _plain(self) -> bool:
        text, self._rest = self._rest, ""
        self._put_text(text)
        return False

    def _find(self) -> bool:
        """Looks for the opening of a call; holds back what may be the beginning of one, and white space before it."""
        opening = self._family.opening
        if self._is_after_call:
            self._rest = self._rest.lstrip()
            self._is_after_call = not self._rest
        before, found, after = self._rest.partition(opening)
        if found:
            self._put_text(before.rstrip())
            self._opened, self._rest = before[len(before.rstrip()) :] + opening, after
            self._step = CallReader._read_header
            return True
        ready = before[: len(before) - self._num_held(before)].rstrip()
        self._put_text(ready)
        self._rest = before[len(ready) :]
        return False

    def _read_header(self) -> bool:
        """Reads up to the arguments' brace."""
        whole, partial = _header(self._family.arguments_key, self._family.is_array and not self._is_in_array)
        if match := whole.match(self._rest):
            if match[1] not in self._names:
                return self._give_up()
            self._rest = self._rest[match.end() - 1 :]
            self._scanner, self._opened = _ObjectScanner(), ""
            call_id = self._family.new_id() if self.num_calls < self._max_calls else ""
            self.num_calls += 1
            if call_id:
                self._made.append(CallDelta(self.num_calls - 1, "", call_id, match[1]))
            self._step = CallReader._read_arguments
            return True
        if len(self._rest) > _MAX_HEADER_CHARS or not partial.fullmatch(self._rest):
            return self._give_up()
        return False

    @property
    def _is_in_array(self) -> bool:
        return self._family.is_array and self.num_calls > 0

    def _give_up(self) -> bool:
        """Takes an opening for content."""
        self._put_text(self._opened)
        self._opened = ""
        self._step = CallReader._find if self._family.opening else CallReader._plain
        return True

    def _read_arguments(self) -> bool:
        num = self._scanner.take(self._rest)
        piece, self._rest = self._rest[:num], self._rest[num:]
        if piece and self.num_calls <= self._max_calls:
            self._made.append(CallDelta(self.num_calls - 1, piece))
        if self._scanner.is_over:
            self._scanner = _ObjectScanner(depth=1)  # the rest of the object that holds them
            self._step = CallReader._leave
        return bool(self._rest)

    def _leave(self) -> bool:
        """Reads past the end of a call: other members of its object, and the closing."""
        self._rest = self._rest[self._scanner.take(self._rest) :]
        if not self._scanner.is_over:
            return False
        self._step = CallReader._between
        return True

    def _between(self) -> bool:
        family, rest = self._family, self._rest.lstrip()
        if not rest:
            return False
        if family.is_array and rest[0] in ",]":
            self._rest = rest[1:]
            self._is_after_call = rest[0] == "]"
            self._step = CallReader._find if self._is_after_call else CallReader._read_header
            return True
        if family.closing.startswith(rest) and rest != family.closing:
            return False  # a part of it
        self._rest, self._is_after_call = rest.removeprefix(family.closing), True
        self._step = CallReader._find if family.opening else CallReader._plain
        return True


class _ObjectScanner:
    """Finds the end of a JSON object by its braces, strings apart."""

    def __init__(self, depth: int = 0) -> None:
        self.is_over = False
        self._depth = depth
        self._is_in_string = self._is_escaped = False

    def take(self, text: str) -> int:
        """Returns how many characters of `text` belong to the object."""
        for index, each in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped, self._is_in_string = each == "\\", each != '"'
            elif each == '"':
                self._is_in_string = True
            elif each in "{[":
                self._depth += 1
            elif each in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return index + 1
        return len(text)


@cache
def _header(arguments_key: str, has_bracket: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Returns patterns for a call up to its arguments' brace: the whole of it, and any beginning of that."""
    space, name = r"\s*", r"([\w.-]*)"
    atoms = [space, *([r"\[", space] if has_bracket else []), r"\{", space, *'"name"', space, ":", space]
    atoms += ['"', name, '"', space, ",", space, *f'"{arguments_key}"', space, ":", space, r"\{"]
    partial = ""
    for atom in reversed(atoms):
        partial = f"{atom}(?:{partial})?" if partial else atom
    return re.compile("".join(atoms)), re.compile(partial)
