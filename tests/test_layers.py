"""The dependency arrows of docs/architecture.md, read from the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from benchmarks.house.code import circles, largest_folder, loose_modules, num_levels, room_graph
from benchmarks.house.source import Module, import_graph, read_modules

ROOT = Path(__file__).resolve().parents[1]
OURS = {
    "common",
    "edge_client",
    "cloud_verifier",
    "kernels",
    "training",
    "experiments",
    "models",
    "benchmarks",
    "decoder",
    "ir",
}
ALLOWED = {
    "common": {"common"},
    "kernels": {"kernels"},
    "edge_client": {"edge_client", "common", "kernels", "models"},
    "cloud_verifier": {"cloud_verifier", "common", "kernels", "models"},
    "outrider/decoder": {"decoder", "edge_client", "cloud_verifier", "common", "models"},
}
# Co-located speculation drafts with the edge's own code, and nothing else there does (docs/decisions.md).
EXCEPTIONS = ("cloud_verifier/engine/colocated/", "cloud_verifier/heads/")
HEAVY = {"torch", "transformers", "bitsandbytes", "safetensors"}
TORCH_DRAFT = "edge_client/drafting/pytorch/"


@functools.cache
def our_modules() -> list[Module]:
    """Returns all modules of the repository, parsed once for all tests."""
    return read_modules(ROOT)


def imports_of(path: Path) -> set[str]:
    """Returns the top-level names of every import in a file, those inside functions included, and for a package
    of ours the folder below `outrider`."""
    return names_of(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields what is run when a module is imported: all but the insides of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from at_import(node)


def names_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the top-level names of the imports among some nodes, as `imports_of`."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        names |= {module.removeprefix("outrider.").partition(".")[0] for module in modules}
    return names


def test_our_packages_are_imported_below_outrider_alone() -> None:
    top = re.compile(rf"^\s*(?:from|import) ({'|'.join(OURS - {'benchmarks'})})\b", re.MULTILINE)
    for folder in (*OURS, "outrider/decoder", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not top.search(path.read_text(encoding="utf-8")), path.relative_to(ROOT)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_only_what_lies_below_them(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        excepted = {"edge_client"} if name.startswith(EXCEPTIONS) else set()
        forbidden = (imports_of(path) & OURS) - ALLOWED[package] - excepted
        assert not forbidden, f"{name} imports {forbidden}"


def test_the_verifier_takes_only_drafting_from_the_edge() -> None:
    for path in (ROOT / "cloud_verifier").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        from_edge = {module for module in modules if module.startswith("outrider.edge_client")}
        assert all(module.startswith("outrider.edge_client.drafting.") for module in from_edge), from_edge


@pytest.mark.parametrize("package", ["common", "edge_client"])
def test_the_edge_never_imports_torch_but_for_the_draft_that_is_computed_by_it(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(TORCH_DRAFT):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert not names_of(ast.walk(tree)) & HEAVY, name
        modules = {node.module for node in at_import(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(
            str(module).startswith("outrider.edge_client.drafting.pytorch") for module in modules
        ), name


def test_protobuf_stays_at_the_edge_of_the_code() -> None:
    may = {"cloud_verifier/rpc/service.py", "cloud_verifier/rpc/stream.py", "cloud_verifier/server/server.py"}
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            is_link = name.startswith(("edge_client/transport/link/", "common/pb/", "common/codec/"))
            if not is_link and name not in may:
                assert "outrider.common.pb" not in path.read_text(encoding="utf-8"), name


def test_no_module_imports_itself_through_others() -> None:
    assert not circles(import_graph(our_modules()))


@pytest.mark.parametrize(("package", "max_levels"), [("edge_client", 8), ("cloud_verifier", 6)])
def test_rooms_import_one_way_on_few_levels(package: str, max_levels: int) -> None:
    rooms = room_graph(our_modules(), package)
    assert not circles(rooms)
    assert num_levels(rooms) <= max_levels


def test_rooms_stay_small() -> None:
    modules = our_modules()
    assert len(loose_modules(modules)) <= 12
    folder, size = largest_folder(modules)
    assert size <= 18, folder


def test_every_folder_says_what_belongs_there() -> None:
    inits = [module for module in our_modules() if module.parts[-1] == "__init__"]
    assert not ["/".join(module.parts) for module in inits if not ast.get_docstring(module.tree)]
