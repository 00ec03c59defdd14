"""Runs a module as `python -m` does, and ends it with its owner: when standard input does. And ends processes of a pool
with theirs (`end_with_parent`).

    python -m outrider.experiments.shared.leash outrider.cloud_verifier serve --listen 127.0.0.1:0

`shared.processes` holds the other end of that input and never writes. So a server may be in a session of
its own, where a terminal's Ctrl-C does not reach it before its owner, and still outlives nobody.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time

_PATIENCE_S = 15.0  # of draining, when there is nobody left to be served


def _end_with_owner() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


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
    threading.Thread(target=_end_with_owner, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
