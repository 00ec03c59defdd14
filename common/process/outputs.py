"""A command's output that is closed, full, or read by nobody any more."""

from __future__ import annotations

import errno
import os
import sys

EXIT_UNREAD = 141  # as a shell says it of a process that SIGPIPE ended
# Only of writes; one to standard output names no file.
_FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def replace_closed_outputs() -> None:
    """Lets what is printed to an output that was closed before the start go nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # as long as the process


def tell_failed_write(error: OSError, command: str) -> int | None:
    """Says in a line that the output of a command cannot be written, and returns its exit status; None where the error
    is another."""
    if isinstance(error, BrokenPipeError):
        sys.stderr.close()  # the reader of our output has gone, and a message would fail as well
        return EXIT_UNREAD
    if error.filename is not None or error.errno not in _FAILED_WRITES:
        return None
    print(f"{command}: cannot write the output: {error.strerror}", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is held back could not be written either
    return 1
