"""The stages of the check in the order in which they run, with what each needs and how long it may take."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field

# Read by cuBLAS when it is loaded, hence a process of its own: no product is split over its inner dimension.
NO_SPLIT_K = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
CORE = ("numpy", "torch", "yaml")
DECODER = (*CORE, "transformers", "safetensors", "google.protobuf")
SERVER = (*DECODER, "grpc", "uvloop", "prometheus_client", "onnxruntime", "tokenizers")


@dataclass(frozen=True)
class Stage:
    """Describes a stage: `run` of a module of this folder, in a process of its own.

    It is cut after `limit_s`, or its share of a shorter deadline, and not begun with less than a third of that left.
    `packages` are the modules that it cannot do without. Without a stage that `is_needed` none after it is run.
    """

    name: str
    module: str
    limit_s: float
    packages: tuple[str, ...] = CORE
    environment: dict[str, str] = field(default_factory=dict)
    is_needed: bool = False

    def missing_packages(self) -> list[str]:
        """Returns those of `packages` that are not installed."""
        return missing_of(self.packages)


# What ends early leaves its time to the others, which share what is left as their limits say. The first one's allows
# for a cold disk, as all others wait for it.
STAGES = (
    Stage("environment", "environment", 60, ("torch",), is_needed=True),
    Stage("kernels", "kernels", 35, (*CORE, "triton")),
    Stage("attention", "attention", 35),
    Stage("step", "step", 60, DECODER),
    Stage("texts", "texts", 60, (*DECODER, "tokenizers")),
    Stage("products", "products", 15),
    Stage("products_no_split_k", "products", 10, environment=NO_SPLIT_K),
    Stage("load", "load", 50, SERVER),
    Stage("served", "served", 110, (*SERVER, "tqdm")),
    Stage("tests", "marked_tests", 85, (*DECODER, "pytest", "tokenizers")),
    Stage("training", "training", 40, (*DECODER, "tqdm", "tokenizers")),
)
TOTAL_S = sum(stage.limit_s for stage in STAGES)


def missing_of(packages: Sequence[str]) -> list[str]:
    """Returns those of some packages that are not installed."""
    return [package for package in packages if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of its parent
        return False
