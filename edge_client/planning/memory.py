"""Predicts what a target takes of a GPU's memory, and how many sessions fit beside it. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from outrider.common.config.units import show_scaled, show_size
from outrider.common.models.memory import KEPT_SHARE, NF4_BYTES, kv_token_bytes, step_bytes

WEIGHTS = {"float32": 4, "bfloat16": 2, "nf4": 2}  # bytes of a number outside of NF4's matrices
KV = ("auto", "fp8")
STEP_TOKENS = 512  # --max-step-tokens of a verifier, unless it is configured otherwise
USUAL_GPUS = tuple(gib << 30 for gib in (8, 12, 16, 24, 48, 80, 141))


@dataclass(frozen=True, slots=True)
class Shape:
    """Holds a published model's sizes."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_tables: int  # embedding and head, one where they are tied

    @property
    def table_share(self) -> float:
        """Returns the share of the parameters that embedding and head have."""
        return self.num_tables * self.vocab_size * self.num_heads * self.head_dim / self.num_params


# Of Llama 3, which has more KV than others of its size: a model of another size is taken to be like the nearest.
SHAPES = (
    Shape("Llama 3.2 1B", 1.24e9, 16, 32, 8, 64, 128_256, 1),
    Shape("Llama 3.2 3B", 3.21e9, 28, 24, 8, 128, 128_256, 1),
    Shape("Llama 3.1 8B", 8.03e9, 32, 32, 8, 128, 128_256, 2),
    Shape("Llama 3.1 70B", 70.6e9, 80, 64, 8, 128, 128_256, 2),
    Shape("Llama 3.1 405B", 405.9e9, 126, 128, 8, 128, 128_256, 2),
)


def nearest_shape(num_params: float) -> Shape:
    """Returns the known model of the nearest size, by ratio."""
    return min(SHAPES, key=lambda shape: abs(math.log(shape.num_params / num_params)))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Holds what is asked, and answers it."""

    num_params: float
    weights: str  # of `WEIGHTS`
    kv: str  # of `KV`
    shape: Shape
    kv_heads: tuple[int, int, int] | None  # layers, KV heads, their size, where they are given
    context: int  # tokens of a session
    num_sessions: int  # that should fit; 0: as many as do
    gpus: tuple[int, ...]  # their bytes

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of the weights."""
        itemsize = WEIGHTS[self.weights]
        of_tables = self.shape.table_share * itemsize
        of_layers = (1 - self.shape.table_share) * (NF4_BYTES if self.weights == "nf4" else itemsize)
        return round(self.num_params * (of_tables + of_layers))

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token's KV."""
        sizes = self.kv_heads or (self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim)
        return kv_token_bytes(*sizes, None if self.kv == "fp8" else WEIGHTS[self.weights])

    @property
    def session_bytes(self) -> int:
        """Returns the bytes of a session's KV."""
        return self.context * self.token_bytes

    @property
    def step_bytes(self) -> int:
        """Returns the bytes of a step, as a verifier with `--kv-memory auto` leaves them free."""
        shape, itemsize = self.shape, WEIGHTS[self.weights]
        return step_bytes(shape.num_heads, shape.head_dim, shape.vocab_size, itemsize, STEP_TOKENS)

    def left_for_kv(self, gpu_bytes: int) -> int:
        """Returns the bytes of a GPU that are left for KV; negative where the weights do not fit."""
        return int((1 - KEPT_SHARE) * gpu_bytes) - self.weight_bytes - self.step_bytes

    def sessions_on(self, gpu_bytes: int) -> int:
        """Returns how many sessions fit."""
        return max(0, self.left_for_kv(gpu_bytes) // self.session_bytes)

    def fits(self, gpu_bytes: int) -> bool:
        """Returns whether as many sessions fit as are asked for, or one."""
        return self.sessions_on(gpu_bytes) >= max(1, self.num_sessions)

    @property
    def least_gpu_bytes(self) -> int:
        """Returns the smallest GPU on which they do."""
        needed = self.weight_bytes + self.step_bytes + max(1, self.num_sessions) * self.session_bytes
        return math.ceil(needed / (1 - KEPT_SHARE))


def memory_text(plan: MemoryPlan) -> str:
    """Returns the conclusion, what the target takes, and a line for each GPU."""
    return "\n".join([*_headline(plan), "", *_part_lines(plan), "", *_gpu_lines(plan)])


def _headline(plan: MemoryPlan) -> list[str]:
    size = show_scaled(plan.num_params).replace(" G", " B").replace(" ", "")
    count = max(1, plan.num_sessions)
    sessions = f"{count:,} session{'s' if count > 1 else ''} of {plan.context:,} tokens"
    what = f"A target of {size} parameters with {plan.weights} weights and {sessions}"
    least = f"needs a GPU of {show_size(plan.least_gpu_bytes)} at least"
    if len(plan.gpus) > 1:
        return [f"{what} {least}."]
    (gpu,) = plan.gpus
    if not plan.fits(gpu):
        return [f"{what} does not fit on a GPU of {show_size(gpu)}: it {least}."]
    return [f"{what} fits on a GPU of {show_size(gpu)}, which has room for {plan.sessions_on(gpu):,}."]


def _part_lines(plan: MemoryPlan) -> list[str]:
    shape, per_param = plan.shape, plan.weight_bytes / plan.num_params
    tables = f"{shape.table_share:.0%} of all in embedding and head (assumed, as {shape.name})"
    sizes = plan.kv_heads or (shape.num_layers, shape.num_kv_heads, shape.head_dim)
    origin = "given" if plan.kv_heads else f"assumed, as {shape.name}"
    kv = "fp8" if plan.kv == "fp8" else "float32" if plan.weights == "float32" else "bfloat16"
    heads = "{} layers, {} KV heads of {}".format(*sizes)
    return [
        f"  weights    {show_size(plan.weight_bytes):>9}   {per_param:.2f} bytes a parameter, {tables}",
        f"  KV, token  {show_size(plan.token_bytes):>9}   {kv}; {heads} ({origin})",
        f"  session    {show_size(plan.session_bytes):>9}   {plan.context:,} tokens",
        f"  a step     {show_size(plan.step_bytes):>9}   {STEP_TOKENS} tokens (--max-step-tokens); and "
        f"{KEPT_SHARE:.0%} of the GPU for the allocator and kernels",
    ]


def _gpu_lines(plan: MemoryPlan) -> list[str]:
    lines = [f"{'GPU':>9}{'left for KV':>14}{'tokens':>12}{'sessions':>11}"]
    for gpu in plan.gpus:
        left = plan.left_for_kv(gpu)
        row = f"{show_size(gpu):>9}"
        if left <= 0:
            lines.append(f"{row}{'none':>14}   the weights and a step do not fit")
            continue
        tokens = left // plan.token_bytes
        lines.append(f"{row}{show_size(left):>14}{tokens:>12,}{plan.sessions_on(gpu):>11,}")
    return lines


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Returns the same in bytes."""
    return {
        "num_params": plan.num_params,
        "weights": plan.weights,
        "kv": plan.kv,
        "assumed": {**asdict(plan.shape), "kv_heads_given": plan.kv_heads is not None},
        "weight_bytes": plan.weight_bytes,
        "kv_token_bytes": plan.token_bytes,
        "step_bytes": plan.step_bytes,
        "context": plan.context,
        "num_sessions": plan.num_sessions,
        "least_gpu_bytes": plan.least_gpu_bytes,
        "gpus": [
            {
                "bytes": gpu,
                "kv_bytes": max(0, plan.left_for_kv(gpu)),
                "num_sessions": plan.sessions_on(gpu),
                "fits": plan.fits(gpu),
            }
            for gpu in plan.gpus
        ],
    }


def parse_kv_heads(text: str) -> tuple[int, int, int] | None:
    """Returns layers, KV heads and their size of "28x4x128", None where it is not that."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        return None
    num_layers, num_heads, head_dim = map(int, parts)
    return num_layers, num_heads, head_dim
