"""Runs a module as `python -m` does, and ends it with its owner: when standard input does. And ends processes of a pool
with theirs (`end_with_parent`).

    python -m outrider.experiments.shared.leash outrider.cloud_verifier serve --listen 127.0.0.1:0

`shared.processes` holds the other end of that input and never writes. So a server may be in a session of
its own, where a terminal's Ctrl-C does not reach it before its owner, and still end with it, as soon as its main thread
runs Python. A signal reports the end of that input: a thread that waited for it would have a heap of its own before
the server says how many there are (`common.process.memory`), and would change the memory that is measured.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import runpy
import select
import signal
import sys
import threading

_PATIENCE_S = 15  # of draining, when there is nobody left to be served


def end_with_owner() -> None:
    """Ends this process when standard input, a pipe, is closed at its other end. Called on the main thread."""
    signal.signal(signal.SIGIO, _stop)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it was closed before
        _stop()


def _stop(*_: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    signal.alarm(_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_parent() -> None:
    """Ends this process of `multiprocessing` with the one that started it. For the initializer of a pool, whose
    processes would else wait for work for ever once their owner was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a process that nothing started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Runs the command."""
    end_with_owner()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
