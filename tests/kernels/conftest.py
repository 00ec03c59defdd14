"""For the cases that test_triton_kernels.py runs in a process whose kernels are interpreted."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from benchmarks.interpreter import make_interpreter_quicker

    make_interpreter_quicker()
