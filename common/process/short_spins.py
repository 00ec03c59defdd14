"""To be imported before anything imports torch: threads of its OpenMP runtime wait actively for a shorter time.

After each product GCC's runtime lets its threads turn for milliseconds, on cores that our kernels' helpers and other
processes need: with some 0.3 ms a step of 24 rows of the embedded target takes 0.7 of its time on two cores, one of 40
rows 0.65, and a prefill of 128 rows, whose products follow one another sooner, 0.9.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")
