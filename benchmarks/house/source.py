"""Reads the tracked Python files of a checkout: modules, what they import, statements, functions, docstrings."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PRODUCT = ("common", "edge_client", "cloud_verifier", "kernels")
FOLDERS = (*PRODUCT, "experiments", "training", "benchmarks", "models", "outrider")
GENERATED = "common/pb/"


@dataclass(frozen=True)
class Module:
    """One source file. `name` is how it is imported, `parts` its path below the top without the suffix."""

    path: Path
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        inside = self.parts[:-1] if self.parts[-1] == "__init__" else self.parts
        return ".".join(inside if inside[0] in ("benchmarks", "outrider") else ("outrider", *inside))

    @property
    def package(self) -> str:
        """Returns the top folder."""
        return self.parts[0]

    @property
    def room(self) -> str:
        """Returns the folder of the package that the file is in, or its own name directly below the package."""
        return self.parts[1] if len(self.parts) > 1 else ""

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    def imports(self) -> set[str]:
        """Returns every dotted name that an import of the file may mean, wherever in the file it is."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return found


def read_modules(root: Path) -> list[Module]:
    """Returns the modules of a checkout without tests and generated stubs."""
    listed = subprocess.run(
        ("git", "ls-files", *(f"{folder}/*.py" for folder in FOLDERS)),
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    kept = [name for name in listed if not name.startswith(GENERATED) and (root / name).is_file()]
    return [Module(root / name, tuple(name.removesuffix(".py").split("/"))) for name in kept]


def import_graph(modules: list[Module]) -> dict[str, set[str]]:
    """Returns for each module the modules it imports. Importing a name counts as importing its module."""
    names = {module.name for module in modules}
    graph: dict[str, set[str]] = {}
    for module in modules:
        direct = {each if each in names else each.rpartition(".")[0] for each in module.imports()}
        graph[module.name] = (direct & names) - {module.name}
    return graph
