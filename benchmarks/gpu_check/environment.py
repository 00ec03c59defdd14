"""What is installed, which of our modules import, and the device's own ceilings."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from typing import Any

import torch

from benchmarks.gpu_check.stage import NONE, Report, Setting
from outrider.experiments.sweep.machine import cpu_model

PACKAGES = (
    *("torch", "triton", "transformers", "numpy", "numba", "safetensors", "tokenizers", "onnxruntime"),
    *("protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection", "prometheus-client", "uvloop"),
    *("bitsandbytes", "pytest", "pytest-timeout", "hypothesis", "tqdm"),
)
MODULES = (
    "outrider.cloud_verifier.backends.loading",
    "outrider.cloud_verifier.server.server",
    "outrider.edge_client.drafting.onnx.model",
    "outrider.experiments.load.command",
    "outrider.kernels.device",
    "outrider.training.target.train",
)
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem",
    "--format=csv",
)


def run(setting: Setting, report: Report) -> None:
    """Raises RuntimeError where there is no GPU and it is no rehearsal."""
    report.note(cpu=cpu_model(), packages={name: _version(name) for name in PACKAGES})
    if not setting.is_rehearsal:
        if not torch.cuda.is_available():
            raise RuntimeError("torch finds no CUDA device; --rehearse runs every stage on a CPU")
        report.note(gpu=torch.cuda.get_device_name(), device=_describe_device())
    errors = {name: error for name in MODULES if (error := _import_error(name))}
    report.note(import_errors=errors)
    names = ", ".join(errors)
    report.check(
        "gpu.imports",
        f"of {len(MODULES)} modules that failed to import {names}",
        len(errors),
        "",
        NONE,
    )
    report.figure("gpu.copy", "copy on the device, bytes read and written", setting.copy_gbps(), "GB/s")
    report.figure("gpu.product", "product of square matrices, bfloat16", product_tflops(setting), "TFLOP/s")


def product_tflops(setting: Setting) -> float:
    """Returns the rate of a large product in bfloat16, the ceiling of arithmetic."""
    size = setting.pick(8192, 128)
    left, right = (torch.randn((size, size), device=setting.device).bfloat16() for _ in range(2))
    return 2 * size**3 / 1e9 / setting.device_ms(lambda: left @ right)


def _describe_device() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    described = {
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "num_devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=10, check=False)
        described["nvidia_smi"] = done.stdout.splitlines()[-1:]
    except (OSError, subprocess.TimeoutExpired) as error:
        described["nvidia_smi"] = str(error)
    return described


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # an absent package, or one whose version ours refuses
        return f"{type(error).__name__}: {error}"[:300]
    return ""
