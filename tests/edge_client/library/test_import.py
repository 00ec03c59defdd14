"""`import outrider` costs next to nothing, and a client needs neither torch nor transformers."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest

import outrider
from outrider.common.types import RoundError, RoundErrorCode
from outrider.edge_client.config.request_config import NoEffectError
from outrider.edge_client.transport.link.base import UnreadableAnswerError

HEAVY = ("torch", "transformers", "bitsandbytes", "safetensors")


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_the_import_brings_one_module_of_ours_and_no_package() -> None:
    code = "import sys; before = {*sys.modules}; import outrider; print(*sorted({*sys.modules} - before))"
    modules = run_python(code).split()
    assert [name for name in modules if name.startswith("outrider")] == ["outrider"]
    assert {name.partition(".")[0] for name in modules} - {"outrider"} <= sys.stdlib_module_names
    assert "importlib.metadata" not in modules, "it takes longer than everything else"


def test_a_decoder_imports_torch_for_a_target_in_this_process_alone() -> None:
    code = "import sys, outrider; [getattr(outrider, name) for name in outrider.__all__]; print(*sys.modules)"
    modules = run_python(code).split()
    assert {"outrider.decoder.decoder", "outrider.decoder.kv", "outrider.ir"} <= {*modules}
    assert not {*HEAVY} & {*modules}


def test_a_client_generates_without_the_verifiers_packages(address: str) -> None:
    code = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None  # an import of it fails
import json, outrider
with outrider.connect(sys.argv[1], max_new_tokens=4) as client:
    print(json.dumps([len(client.generate("def add(", seed=1).ids), outrider.__version__]))
"""
    assert json.loads(run_python(code, address)) == [4, outrider.__version__]


def test_every_public_name_is_there_and_errors_are_of_one_tree() -> None:
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
        assert name in dir(outrider)
    errors = [getattr(outrider, name) for name in outrider.__all__ if name.endswith("Error")]
    assert len(errors) >= 9 and all(issubclass(error, outrider.OutriderError) for error in errors)
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = outrider.conect  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        outrider.UsageError("top_p is 2", "give 0 to 1"),
        outrider.RoundFailedError(RoundError(1, RoundErrorCode.INVALID, "too long", field="token_ids")),
        NoEffectError("tree", "the mode does not draft"),
        UnreadableAnswerError("localhost:1", "a verdict of nothing"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_reaches_who_started_the_process_that_met_it(error: outrider.OutriderError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error) and str(there) == str(error) and vars(there) == vars(error)
