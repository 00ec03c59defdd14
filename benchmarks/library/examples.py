"""`lib.examples`: the four examples of docs/library.md, with a target in this process and with a remote one."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, cast

import outrider
from benchmarks.library.page import (
    NAMES,
    decoder_examples,
    expected_lines,
    make_folder,
    run_example,
    serve_config,
)
from benchmarks.results_file import Found
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import at_least, judged


def run() -> Found:
    """Returns the measure: examples that print what the page says, and whose text is cloud-only's."""
    examples = decoder_examples()
    right: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = make_folder(Path(folder))
        heads = [part for path in serve_config(root).heads for part in ("--heads", path)]
        with contextlib.chdir(root), running_verifier("--log-level", "error", *heads) as verifier:
            for where, target in (("here", ""), ("grpc", f"grpc://{verifier.address}")):
                names: dict[str, Any] = {}
                for name, example in zip(NAMES, examples, strict=True):
                    is_said = run_example(example, names, target) == expected_lines(example)
                    tokens = cast("list[int]", names.get("tokens", names["first"]))
                    wanted = _alone(verifier.address, names["prompt"])
                    right[f"{name}, {where}"] = is_said and tokens == wanted
    what = "examples of docs/library.md that print what it says, in this process and over gRPC, with cloud-only's text"
    measure = judged("lib.examples", what, sum(right.values()), "examples", at_least(2 * len(NAMES)))
    return [measure], {"right": right}


def _alone(address: str, prompt: list[int]) -> list[int]:
    with outrider.connect(address, draft="none") as client:
        return list(client.generate(prompt, max_new_tokens=24, temperature=0.8, seed=7).ids)
