"""What is imported is named in pyproject.toml, by itself: what only another package brings may be gone tomorrow."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import sys
import tomllib
from pathlib import Path

import pytest
from test_layers import OURS, ROOT, imports_of

# Packages that are part of another's interface, which brings the version that fits.
WITH = {"llvmlite": "numba", "markupsafe": "jinja2", "huggingface-hub": "tokenizers", "pydantic": "openai"}


def own_name(name: str) -> str:
    """Returns a distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named_distributions() -> set[str]:
    """Returns the distributions that the project or one of its extras asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    return {own_name(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in wanted}


@pytest.mark.parametrize("folder", [*sorted(OURS - {"decoder", "ir"}), "outrider", "tests"])
def test_each_imported_package_is_named(folder: str) -> None:
    named, brought_by = named_distributions(), importlib.metadata.packages_distributions()
    others: dict[str, list[str]] = {}
    for path in (ROOT / folder).rglob("*.py"):
        here = {each.stem for each in Path(path.parent).iterdir()}
        for module in imports_of(path) - set(sys.stdlib_module_names) - OURS - here:
            distributions = {own_name(each) for each in brought_by.get(module, ())}
            if distributions and not (distributions | {WITH.get(each) for each in distributions}) & named:
                others.setdefault(module, []).append(path.name)
    assert not others
