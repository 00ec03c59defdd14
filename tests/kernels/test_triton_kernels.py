"""The GPU's kernels where there is no GPU: run by Triton's interpreter, and compiled for real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_interpreted_kernels_pass_their_cases():
    cases = Path(__file__).parent / "triton_cases.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(cases)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.kernels import device

kinds = {
    "*fp32": "logits temperatures thresholds tops totals weighted_totals",
    "*fp64": "known_tops known_log_sums changed_weights bests",
    "*i32": "changed_ids best_ids", "*i64": "keys", "i32": "row_stride num_tokens",
}
kind_of = {name: kind for kind, names in kinds.items() for name in names.split()}
for is_residual, capability in ((False, 80), (True, 80), (False, 90), (True, 90)):
    values = dict(IS_RESIDUAL=is_residual, HAS_NOISE=True, NUM_BLOCKS=device.TILE_BLOCKS, SPAN=device.SPAN)
    values["NUM_CHANGED"] = device.MAX_CHANGED if is_residual else 1
    signature = {name: kind_of.get(name, "constexpr") for name in device._search.arg_names}
    source = ASTSource(fn=device._search, signature=signature, constexprs=values)
    options = {"enable_fp_fusion": False}
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    print(len(compiled.asm["cubin"]) > 0)
"""


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert run.stdout == "True\n" * 4, run.stderr
