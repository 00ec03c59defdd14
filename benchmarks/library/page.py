"""The examples of `SpeculativeDecoder` in docs/library.md, and what they need to run."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

from benchmarks.results_file import ROOT
from outrider.cloud_verifier.config import ServeConfig
from outrider.models import EMBEDDED
from outrider.training.draft.restore import restore_draft

PAGE = ROOT / "docs" / "library.md"
TITLE = "\n## `SpeculativeDecoder`\n"
NAMES = ("small model", "Medusa, tree", "INT4 of the family, FP8 KV", "first layers, shared KV")
_LAYERS = [0, 1, 2, 3]  # of the fourth example


def decoder_examples() -> list[str]:
    """Returns the code of the four examples, which run one after the other."""
    section = PAGE.read_text(encoding="utf-8").partition(TITLE)[2]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def expected_lines(example: str) -> list[str]:
    """Returns what an example says that it prints."""
    return re.findall(r"  # prints (.*)", example)


def make_folder(root: Path) -> Path:
    """Makes the folder in which the examples run: the embedded pair, and a small model of its family."""
    (root / "models").mkdir(parents=True)
    (root / "models" / "embedded").symlink_to(EMBEDDED)
    (root / "drafts").mkdir()
    restore_draft(EMBEDDED / "draft", root / "drafts" / "small")
    return root


def serve_config(root: Path) -> ServeConfig:
    """Returns the options of a verifier that drafts as the examples ask a remote one to; makes a directory for it."""
    layers = root / "layers"
    layers.mkdir()
    ours = {"outrider": {"kind": "early_exit", "layers": _LAYERS}}
    (layers / "config.json").write_text(json.dumps(ours), encoding="utf-8")
    return ServeConfig(heads=(str(EMBEDDED / "heads" / "medusa"), str(layers)))


def run_example(example: str, names: dict[str, object], target: str = "") -> list[str]:
    """Runs one in the working directory, with the names that those before it left; returns the lines that it prints.
    `target` replaces the page's own."""
    code = re.sub(r'target = ".*?"', f'target = "{target}"', example) if target else example
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), names)
    return printed.getvalue().splitlines()
