"""Method name → implementation, imported when first asked for."""

from __future__ import annotations

import importlib
from functools import cache

from cloud_verifier.methods.base import VerificationMethod
from common.types import Method

_IMPLEMENTATIONS = {
    Method.COUPLED: "cloud_verifier.methods.coupled:CoupledMethod",
    Method.SPARSE: "cloud_verifier.methods.sparse:SparseMethod",
    Method.CANDIDATES: "cloud_verifier.methods.candidates:CandidatesMethod",
    Method.BLOCK: "cloud_verifier.methods.block:BlockMethod",
    Method.SHORTCUT: "cloud_verifier.methods.shortcut:ShortcutMethod",
    Method.SCALAR_RESIDUAL: "cloud_verifier.methods.scalar_residual:ScalarResidualMethod",
    Method.THRESHOLD: "cloud_verifier.methods.threshold:ThresholdMethod",
    Method.TYPICAL: "cloud_verifier.methods.typical:TypicalMethod",
}


@cache
def create_method(method: Method) -> VerificationMethod:
    module_name, _, class_name = _IMPLEMENTATIONS[method].partition(":")
    implementation: VerificationMethod = getattr(importlib.import_module(module_name), class_name)()
    return implementation
