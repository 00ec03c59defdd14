"""Starts one verifier after the other, each a fork of this process: `python -m benchmarks.reliability.forked
MODULE FLAG ...`. Each line of standard input is an address to serve on; the verifier's process id is printed,
then what it prints. The end of the input ends it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

IMPORTED = (
    "outrider.cloud_verifier.backends.loading",
    "outrider.cloud_verifier.backends.paged_backend",
    "outrider.cloud_verifier.server.server",
    "outrider.cloud_verifier.security.server_security",
    "outrider.edge_client.drafting.onnx.model",
    # What these import when a Llama is first loaded.
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.conversion_mapping",
)


def main() -> None:
    """Runs the command."""
    module, *flags = sys.argv[1:]
    command = importlib.import_module(module)
    for name in IMPORTED:
        importlib.import_module(name)
    child = 0
    for line in sys.stdin:
        if child:
            os.waitpid(child, 0)  # killed before another is asked for
        child = os.fork()
        if not child:
            # Not the parent's, and not free: libuv aborts when it closes a 0 of its own.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            print(os.getpid(), flush=True)
            sys.exit(command.main([*flags, "--listen", line.strip(), "--admin-listen", "none"]))
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
