"""Runs a conversation in the terminal: lines in, answers out, commands that begin with a slash."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from outrider.common.errors import OutriderError, UsageError
from outrider.common.printable import one_line
from outrider.edge_client.config.methods import judging_method
from outrider.edge_client.controller.slow_draft import slow_draft_note
from outrider.edge_client.core.options import REQUESTABLE_MODES
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.edge_client.ui.conversation import Conversation
from outrider.edge_client.ui.terminal import TextPrinter, readable, stretch_words, summary

_MAX_HISTORY = 1000  # lines
_BLOCK = '"""'
_HELP = "/stats  /mode [M]  /system [TEXT]  /reset  /quit   Ctrl-C stops an answer, Ctrl-D leaves"
_WELCOME = "Type a message; /help lists commands."
_NO_TEMPLATE = (
    "This model has no chat template, so it does not see a conversation: what you type is continued as plain\n"
    "text, and your next line is added after its answer. --chat-template FILE gives it one."
)


class Repl:
    """Reads messages from `words` and writes answers to `out`; prompts and remarks only where both are a
    terminal. `history` is a file that keeps typed lines for the next time."""

    def __init__(
        self,
        conversation: Conversation,
        words: TextIO,
        out: TextIO,
        *,
        has_colour: bool = True,
        history: Path | None = None,
    ) -> None:
        self._conversation = conversation
        self._words, self._out = words, out
        self._has_colour = has_colour
        self._history = history
        self._is_terminal = words.isatty() and out.isatty()
        self._last: SessionResult | None = None
        self._has_noted_slow_draft = False
        self._status = 0

    def run(self) -> int:
        """Returns the exit status when the user leaves: 0 on a terminal, else that of the first line that failed.

        Raises `UsageError` for a history file that cannot be used.
        """
        if not self._is_terminal:
            self._converse()
            return self._status
        with _editable_lines(self._history):
            self._converse()
        return 0

    def _converse(self) -> None:
        self._remark(_WELCOME if self._conversation.has_template else _NO_TEMPLATE)
        while (message := self._read()) is not None:
            if not message.strip():
                continue
            try:
                if message.startswith("/"):
                    if not self._obey(*message[1:].strip().partition(" ")[::2]):
                        return
                else:
                    self._answer(message)
            except OutriderError as error:
                print(f"edge-client: {one_line(str(error))}", file=sys.stderr)
                self._status = self._status or error.exit_code

    # --------------------------------------------------------------------------------------- input

    def _read(self) -> str | None:
        """Returns a message of one line or several; None at the end. Ctrl-C drops a message that was
        begun."""
        while True:
            try:
                return self._read_message()
            except EOFError:
                self._remark("")
                return None
            except KeyboardInterrupt:
                self._remark("\n(/quit or Ctrl-D leaves)")

    def _read_message(self) -> str:
        line = self._line("> ")
        if line.lstrip().startswith(_BLOCK):
            return self._read_block(line.lstrip().removeprefix(_BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            if (more := self._further_line()) is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _read_block(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].rstrip().endswith(_BLOCK)):
            if (more := self._further_line()) is None:
                return "\n".join(lines)
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines if lines[-1] else lines[:-1])

    def _further_line(self) -> str | None:
        """Returns the next line of a message that was begun; None at a pipe's end, with which the message ends."""
        try:
            return self._line(". ")
        except EOFError:
            if self._is_terminal:  # Ctrl-D leaves
                raise
            return None

    def _line(self, prompt: str) -> str:
        if self._is_terminal:
            return input(prompt)
        line = self._words.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    # ------------------------------------------------------------------------------------ commands

    def _obey(self, name: str, argument: str) -> bool:
        commands: dict[str, Callable[[str], None]] = {
            "stats": self._show_stats,
            "mode": self._set_mode,
            "system": self._set_system,
            "reset": self._reset,
            "help": lambda _: self._say(_HELP),
        }
        if name in ("quit", "exit", "bye"):
            return False
        if name not in commands:
            raise UsageError(f"there is no command /{name}; {_HELP}")
        commands[name](argument.strip())
        return True

    def _show_stats(self, _: str) -> None:
        if self._last is None:
            self._say("nothing was answered yet")
            return
        every = self._last.stats.summary(self._last.origins)
        every["stretches"] = stretch_words(every["stretches"])
        stats = {name: value for name, value in every.items() if value not in (None, 0, [], "")}
        width = max(map(len, stats))
        self._say("\n".join(f"{name:<{width}}  {_words(value)}" for name, value in stats.items()))

    def _set_mode(self, name: str) -> None:
        if name:
            self._conversation.set_mode(name)
        self._say(f"mode {self._conversation.config.mode}; there are {', '.join(REQUESTABLE_MODES)}")

    def _set_system(self, text: str) -> None:
        if not text:
            self._say(
                self._conversation.system
                or 'there is no system message; /system TEXT sets one, /system "" none'
            )
            return
        is_none = text == '""'
        self._conversation.set_system("" if is_none else text)
        self._say(f"the conversation begins anew with{'out a' if is_none else ' this'} system message")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._say("forgotten")

    # -------------------------------------------------------------------------------------- answer

    def _answer(self, message: str) -> None:
        session = self._conversation.begin(message)
        printer = TextPrinter(self._out, self._has_colour)
        try:
            with _stop_on_interrupt(session):
                is_reverified = self._conversation.config.outage.reverify
                for event in readable(session.generate(), self._out, is_reverified):
                    printer.show(event)
        finally:
            result = self._last = session.result
            printer.finish()
            if result.token_ids:
                self._conversation.add(message, result.text)
                self._remark(self._summary(result))
                self._note_slow_draft(result)

    def _note_slow_draft(self, result: SessionResult) -> None:
        note = slow_draft_note(self._conversation.config.mode, result.stats)
        if note and not self._has_noted_slow_draft:
            self._has_noted_slow_draft = True
            print(f"edge-client: {note} (here: /mode M)", file=sys.stderr)

    def _summary(self, result: SessionResult) -> str:
        labels = (*self._conversation.labels, *(result.model.labels if result.model else ()))
        method = judging_method(self._conversation.config)
        return summary(result, labels, self._conversation.seed, self._has_colour, method)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _remark(self, text: str) -> None:
        """Prints a remark on a terminal; a pipe gets answers only."""
        if self._is_terminal:
            self._say(text)


@contextmanager
def _editable_lines(history: Path | None) -> Iterator[None]:
    """Lets lines be edited, and recalled with the arrow keys. Raises `UsageError` for a `history` file that
    cannot be used."""
    try:
        import readline
    except ImportError:  # Python can be built without it
        yield
        return
    if history is not None:
        try:
            os.close(os.open(history, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            readline.read_history_file(history)
        except OSError as error:
            raise UsageError(f"--history {history}: cannot use it: {error.strerror or error}") from error
        readline.set_history_length(_MAX_HISTORY)
    try:
        yield
    finally:
        if history is not None:
            try:
                readline.write_history_file(history)
            except OSError as error:
                raise UsageError(f"--history {history}: not written: {error.strerror or error}") from error


@contextmanager
def _stop_on_interrupt(session: EdgeSession) -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, lambda number, frame: session.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
