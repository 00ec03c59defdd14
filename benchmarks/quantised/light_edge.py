"""`quant.light_edge`: the edge without the extra `edge-torch`, whose packages cannot be imported and are watched."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.quantised.source import draft_source
from benchmarks.results_file import ROOT, Found
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_least, at_most, judged

PACKAGES = ("torch", "transformers", "bitsandbytes", "safetensors")
TORCH_DRAFT = "outrider.edge_client.drafting.pytorch"
# Runs one command of the edge, or imports all of its modules, and prints which of PACKAGES it asked for.
_WATCHED = f"""
import importlib, importlib.util, json, pkgutil, sys
asked = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in {PACKAGES!r}:
            asked.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=package)
sys.meta_path.insert(0, Watch())
num_modules, status = 0, 0
if sys.argv[1:]:
    from outrider.edge_client.commands.cli import main
    status = main(sys.argv[1:])
else:
    import outrider.common, outrider.edge_client
    for root in (outrider.common, outrider.edge_client):
        for found in pkgutil.walk_packages(root.__path__, root.__name__ + "."):
            if not found.name.endswith("__main__") and not found.name.startswith({TORCH_DRAFT!r}):
                importlib.import_module(found.name)
                num_modules += 1
print("\\n" + json.dumps({{"asked": asked, "status": status, "num_modules": num_modules}}), file=sys.stderr)
"""


def run() -> Found:
    """Returns the measures: packages that the edge asks for, and as a control those that the torch draft does."""
    with running_verifier("--log-level", "error") as verifier, draft_source() as source:
        common = ("--verifier", verifier.address, "--seed", "1", "--max-new-tokens", "32")
        ways: dict[str, tuple[str, ...]] = {
            "every module": (),
            "run": ("run", "def f(", *common),
            "run, trees": ("run", "def f(", *common, "--tree", "8"),
            "run, edge-only": ("run", "def f(", *common, "--mode", "edge-only"),
            "run, prompt-lookup": ("run", "def f(", *common, "--draft-strategy", "prompt-lookup"),
            "doctor": ("doctor", "--verifier", verifier.address),
        }
        found = {name: _watch(arguments) for name, arguments in ways.items()}
        planted = _watch(("run", "def f(", *common, "--draft", str(source), "--draft-backend", "torch"))
    failed = [name for name, each in found.items() if each["status"] != 0]
    assert not failed, f"these ways did not run: {failed}"
    num_modules = found["every module"]["num_modules"]
    what = f"imports of {', '.join(PACKAGES)} by the edge: {num_modules} modules, {', '.join(list(ways)[1:])}"
    asked = sum(len(each["asked"]) for each in found.values())
    control = "the same with --draft-backend torch: the watch sees it"
    return [
        judged("quant.light_edge", what, asked, "imports", at_most(0)),
        judged("quant.light_edge_planted", control, len(planted["asked"]), "imports", at_least(1)),
    ], {"ways": found, "planted": planted}


def _watch(arguments: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-c", _WATCHED, *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    said: dict[str, Any] = json.loads(process.stderr.splitlines()[-1])
    return said
