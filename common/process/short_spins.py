"""Shortens the time for which threads of torch's OpenMP runtime spin, unless GOMP_SPINCOUNT is set.

After each product GCC's runtime has its threads spin for milliseconds, on cores that our kernels' helpers and other
processes need. With 20,000 turns, some 0.3 ms, a step of 24 rows of the embedded target takes 0.7 of its time on two
cores of Zen 5, one of 40 rows 0.65, and a prefill of 128 rows, whose products follow one another sooner, 0.9. Import
this before `torch`, whose runtime reads the variable once.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
