"""The GPU's kernels where there is no GPU: run by Triton's interpreter, and compiled for real ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(900)  # 60 s on an idle machine, twice that beside others
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_interpreted_kernels_pass_their_cases(marked):
    """One process for all: most of a file's time would be the start of its own."""
    cases = sorted(map(str, Path(__file__).parent.glob("*_cases.py")))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", marked, "--no-header", "-p", "no:cacheprovider", *cases],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.kernels import device, device_top, device_truncation

kinds = {
    "*fp32": "scores logits temperatures thresholds tops totals weighted_totals row_tops",
    "*i64": "keys rows token_ids",
    "*fp64": "known_tops known_log_sums changed_weights bests top_ps log_min_ps log_sums entropies",
    "*i32": "changed_ids best_ids top_ks", "i32": "row_stride num_tokens num_spans",
}
kind_of = {name: kind for kind, names in kinds.items() for name in names.split()}
search = dict(HAS_NOISE=True, NUM_BLOCKS=device.TILE_BLOCKS, SPAN=device.SPAN)
spans = dict(PADDED_SPANS=16)
cut = dict(NUM_PIVOTS=device_truncation.NUM_PIVOTS, TILE=device_truncation.TILE)
for capability in map(int, sys.argv[1:]):
    for fn, values, num_warps in (
        (device._search, search | dict(IS_RESIDUAL=False, NUM_CHANGED=1), device.NUM_WARPS),
        (device._search, search | dict(IS_RESIDUAL=True, NUM_CHANGED=device.MAX_CHANGED), device.NUM_WARPS),
        (device._combine_spans, spans | dict(IS_RESIDUAL=False), 1),
        (device._combine_spans, spans | dict(IS_RESIDUAL=True), 1),
        (device_truncation._cut, cut, device_truncation.NUM_WARPS),
        (device_top._score, dict(NUM_BLOCKS=device_top.TILE_BLOCKS), device_top.NUM_WARPS),
    ):
        signature = {name: kind_of.get(name, "constexpr") for name in fn.arg_names}
        source = ASTSource(fn=fn, signature=signature, constexprs=values)
        options = {"enable_fp_fusion": False, "num_warps": num_warps}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(len(compiled.asm["cubin"]) > 0)
"""


def run_without_a_gpu(code, tmp_path, *arguments):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# The compute capabilities of an A100 and of an H100.
of_gpus = pytest.mark.parametrize("gpus", [(90,), pytest.param((80,), marks=pytest.mark.slow)], ids=str)


@of_gpus
def test_the_kernels_compile_for_gpus_that_are_not_here(gpus, tmp_path):
    run = run_without_a_gpu(COMPILE, tmp_path, *map(str, gpus))
    assert run.stdout == "True\n" * 6 * len(gpus), run.stderr


# Prints, for each kernel of a module and each GPU, how much of its registers is spilled to memory.
COMPILE_7B = """
import importlib, itertools, re, subprocess, sys
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.kernels.paged_attention import NUM_STAGES, num_warps

module, names, capabilities = (each.split() for each in sys.argv[1:])
kernels = importlib.import_module(f"outrider.kernels.{module[0]}")
tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
kinds = {
    "*bf16": "query x weight bias out", "*fp32": "tops totals sums", "*i32": "index positions",
    "i32": "head_stride row_stride num_splits window num_rows num_outputs num_inputs output_stride",
    "fp32": "scale cap",
}
kind_of = {name: kind for kind, names in kinds.items() for name in names.split()}
sizes = dict(NUM_KV_HEADS=4, NUM_GROUPS=7, PADDED_GROUPS=8, HEAD_DIM=128, PADDED_DIM=128)
sizes |= dict(HAS_SOFTCAP=False, HAS_BIAS=True, IS_INTERPRETED=False, input_stride=1)
sizes |= {name: getattr(kernels, name) for name in ("KEYS", "ROWS", "OUTPUTS", "INPUTS") if hasattr(kernels, name)}
sizes |= dict(TILE_ROWS=64, SPLIT=getattr(kernels, "SPLIT_TOKENS", 0), EARLY=256)
multiples_of_16 = ("num_outputs", "num_inputs", "output_stride")
for name in names:
    fn = getattr(kernels, name)
    for capability, pool in itertools.product(map(int, capabilities), ("*bf16", "*u8")):
        of_pools = dict.fromkeys(("key_pool", "value_pool"), pool)
        of_pools |= dict.fromkeys(("key_scales", "value_scales"), "*fp16" if pool == "*u8" else pool)
        sizes["HAS_SCALES"] = pool == "*u8"
        signature = {name: (kind_of | of_pools).get(name, "constexpr") for name in fn.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or name in multiples_of_16
        }
        values = {name: sizes[name] for name, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=aligned)
        options = {"num_warps": num_warps(torch.bfloat16), "enable_fp_fusion": True}
        options |= {"num_stages": NUM_STAGES} if name == "_attend_split" else {}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        Path("cubin").write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", "cubin"], capture_output=True, text=True).stdout
        print(name, capability, pool, *re.findall(r"STACK:\\d+", usage))
"""


# Bytes a thread: the sizes are those that are best on an H100, and an A100 has too few registers for FP8.
SPILLED = {("_attend_split", "80 *u8"): 184}


@of_gpus
@pytest.mark.parametrize(
    ("module", "names"), [("paged_attention", ("_attend_split", "_combine")), ("product", ("_multiply",))]
)
def test_over_a_7b_shape_a_kernel_compiles_without_spilled_registers(
    module, names, gpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.chdir(tmp_path)
    run = run_without_a_gpu(COMPILE_7B, tmp_path, module, " ".join(names), " ".join(map(str, gpus)))
    of = [f"{capability} {pool}" for capability in gpus for pool in ("*bf16", "*u8")]
    expected = [f"{name} {each} STACK:{SPILLED.get((name, each), 0)}" for name in names for each in of]
    assert run.stdout.splitlines() == expected, run.stderr


COMPILE_LAYERS = """
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from outrider.kernels import layers as kernels

kinds = {
    "*bf16": "states added weight out qkv norms gate_up", "*fp32": "cos sin", "*i32": "slots", "fp32": "epsilon",
    "*u8": "key_pool value_pool", "*fp16": "key_scales value_scales",
}
kind_of = {name: kind for kind, names in kinds.items() for name in names.split()}
sizes = dict(SIZE=3584, PADDED_SIZE=4096, HAS_ADDED=True, NUM_HEADS=28, NUM_KV_HEADS=4, HALF=64, PADDED_HALF=64)
sizes |= dict(HAS_NORMS=True, HAS_SCALES=True, GATE_SIZE=kernels.GATE_SIZE, IS_GELU=True)
warps = {"_add_norm": kernels.num_warps(3584), "_rotate": 1, "_gate": 4}
for fn in (kernels._add_norm, kernels._rotate, kernels._gate):
    for capability in map(int, sys.argv[1:]):
        signature = {name: kind_of.get(name, "constexpr") for name in fn.arg_names}
        values = {name: sizes[name] for name, kind in signature.items() if kind == "constexpr"}
        source = ASTSource(fn=fn, signature=signature, constexprs=values)
        options = {"num_warps": warps[fn.__name__]}
        compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(fn.__name__, capability, len(compiled.asm["cubin"]) > 0)
"""


@of_gpus
def test_the_kernels_of_a_layer_compile_for_gpus_that_are_not_here(gpus, tmp_path):
    run = run_without_a_gpu(COMPILE_LAYERS, tmp_path, *map(str, gpus))
    names = [f"{name} {capability}" for name in ("_add_norm", "_rotate", "_gate") for capability in gpus]
    assert run.stdout.splitlines() == [f"{name} True" for name in names], run.stderr
