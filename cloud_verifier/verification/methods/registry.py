"""Method name → implementation, imported when first used."""

from __future__ import annotations

import importlib
from functools import cache

from outrider.cloud_verifier.verification.methods.base import VerificationMethod
from outrider.common.types import Method

_IMPLEMENTATIONS = {
    Method.COUPLED: "outrider.cloud_verifier.verification.methods.coupled:CoupledMethod",
    Method.SPARSE: "outrider.cloud_verifier.verification.methods.sparse:SparseMethod",
    Method.CANDIDATES: "outrider.cloud_verifier.verification.methods.candidates:CandidatesMethod",
    Method.BLOCK: "outrider.cloud_verifier.verification.methods.block:BlockMethod",
    Method.SHORTCUT: "outrider.cloud_verifier.verification.methods.shortcut:ShortcutMethod",
    Method.SCALAR_RESIDUAL: "outrider.cloud_verifier.verification.methods.scalar_residual:ScalarResidualMethod",
    Method.THRESHOLD: "outrider.cloud_verifier.verification.methods.threshold:ThresholdMethod",
    Method.TYPICAL: "outrider.cloud_verifier.verification.methods.typical:TypicalMethod",
}


@cache
def create_method(method: Method) -> VerificationMethod:
    """Returns the one instance of a method's implementation."""
    module_name, _, class_name = _IMPLEMENTATIONS[method].partition(":")
    implementation: VerificationMethod = getattr(importlib.import_module(module_name), class_name)()
    return implementation
