"""The device of tests marked `gpu`: CUDA, or what OUTRIDER_GPU_TESTS names, for a rehearsal of them on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

GPU_DEVICE = os.environ.get("OUTRIDER_GPU_TESTS", "cuda")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU_DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
]
