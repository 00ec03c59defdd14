"""Names what computes a draft model, and how: settings that are checked before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.errors import UsageError

ONNX, TORCH = BACKENDS = ("onnx", "torch")
NF4, FP8 = "nf4", "fp8"
WEIGHTS = ("auto", NF4, FP8, "bfloat16", "float32")
KV_DTYPES = ("auto", FP8)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Holds what the flags --draft-backend, --draft-device, --draft-weights and --draft-kv-dtype say."""

    name: str = ONNX
    device: str = (
        "auto"  # torch: one of its devices; auto is the accelerator where there is one, else the CPU
    )
    weights: str = "auto"  # torch: auto is bfloat16 on an accelerator and float32 on a CPU
    kv_dtype: str = "auto"  # torch: auto is what the model computes in

    def check(self) -> None:
        """Raises `UsageError` for a setting that its backend does not have."""
        if self.name not in BACKENDS:
            raise UsageError(f"unknown draft backend {self.name!r}; known: {', '.join(BACKENDS)}")
        if self.name == TORCH:
            return
        has = {"device": "onnxruntime drafts on the CPU", "weights": "an exported draft has INT4 weights"}
        has["kv-dtype"] = "onnxruntime's draft keeps its KV in float32"
        for flag, value in (("device", self.device), ("weights", self.weights), ("kv-dtype", self.kv_dtype)):
            if value not in ("auto", "cpu"):
                raise UsageError(f"--draft-{flag} {value} goes with --draft-backend torch: {has[flag]}")
