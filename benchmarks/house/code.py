"""Statements, lengths of functions, and docstrings that are sentences."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping

import networkx

from benchmarks.house.source import PRODUCT, Module, import_graph

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FRAGMENTS = frozenset(
    "of what whether how who whose where which when why behind as with without for from to in".split()
)
_VERBS = frozenset(
    "is are was were has have had can may must does do will be accepts adds allows answers asks arrives "
    "begins belongs bounds bring brings calls carries changes checks chooses closes comes compares "
    "computes contains costs counts covers decides decodes depends describes drafts drops ends expects "
    "expires fails fills finds follows gets gives goes happens holds imports includes keeps knows leads "
    "leaves lets lies limits lists loads looks makes maps marks matches means measures names needs "
    "opens owns passes picks prints produces proposes raises ranks reaches reads receives refuses "
    "rejects removes replaces reports requires resends runs samples says sends serves sets shares shows "
    "sizes starts stays stops stores takes tells tries turns uses verifies wants warns waits works "
    "writes yields".split()
)


def num_statements(modules: list[Module]) -> int:
    """Returns how many `ast` statements the modules have."""
    return sum(isinstance(node, ast.stmt) for module in modules for node in ast.walk(module.tree))


def function_lengths(modules: list[Module]) -> tuple[float, float]:
    """Returns the median and the 90th percentile of the product's functions in lines, decorators left out."""
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        if module.package in PRODUCT
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return statistics.median(lengths), statistics.quantiles(lengths, n=10)[-1]


def _public(
    tree: ast.Module | ast.ClassDef, bases: dict[str, ast.ClassDef]
) -> Iterator[tuple[Definition, str | None]]:
    """Yields public classes, functions and methods with their docstring, a base class's where they have none."""
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node)
        if text is None and isinstance(tree, ast.ClassDef):
            text = _inherited(node.name, tree, bases)
        yield node, text
        if isinstance(node, ast.ClassDef):
            yield from _public(node, bases)


def _inherited(name: str, owner: ast.ClassDef, bases: dict[str, ast.ClassDef]) -> str | None:
    for base in owner.bases:
        known = bases.get(base.id) if isinstance(base, ast.Name) else None
        for node in known.body if known else ():
            if isinstance(node, Definition) and node.name == name and ast.get_docstring(node):
                return ast.get_docstring(node)
    return None


def is_sentence(text: str | None) -> bool:
    """Returns whether a docstring opens with a sentence: no fragment, punctuation at its end, and a verb.

    A third-person verb at the beginning counts ("Returns the ..."), and a word of `_VERBS` after it. The rule is
    rough: it finds riddles without a verb, and a reader must find the others.
    """
    if not text:
        return False
    first = re.split(r"(?<=[.:;])(?:\s|$)", text.strip(), maxsplit=1)[0]
    words = re.findall(r"[\w'`]+", first)
    has_verb = bool(re.fullmatch(r"[A-Z][a-z]+s", words[0])) or any(word in _VERBS for word in words[1:])
    return words[0].lower() not in _FRAGMENTS and first[-1] in ".:;" and has_verb


def docstrings(modules: list[Module]) -> tuple[int, list[str]]:
    """Returns the number of public definitions of the product, and those without a sentence as PATH:LINE NAME."""
    product = [module for module in modules if module.package in PRODUCT]
    bases = {n.name: n for module in product for n in ast.walk(module.tree) if isinstance(n, ast.ClassDef)}
    total, missing = 0, []
    for module in product:
        for node, text in _public(module.tree, bases):
            total += 1
            if not is_sentence(text):
                missing.append(f"{'/'.join(module.parts)}.py:{node.lineno} {node.name}")
    return total, missing


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components of more than one node."""
    components = networkx.strongly_connected_components(networkx.DiGraph(graph))
    return [sorted(component) for component in components if len(component) > 1]


def room_graph(modules: list[Module], package: str) -> dict[str, set[str]]:
    """Returns for each room of a package the rooms it imports."""
    rooms = {module.name: module.room for module in modules if module.package == package and module.room}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values() if not room.startswith("__")}
    for name, imported in import_graph(modules).items():
        if name in rooms and rooms[name] in graph:
            graph[rooms[name]] |= {rooms[other] for other in imported if other in rooms} & set(graph)
    return {room: others - {room} for room, others in graph.items()}


def num_levels(graph: Mapping[str, set[str]]) -> int:
    """Returns the number of nodes of the longest chain of imports; the graph must have no circle."""
    return len(networkx.dag_longest_path(networkx.DiGraph(graph)))


def loose_modules(modules: list[Module]) -> list[str]:
    """Returns the modules directly in the folders of the edge and of the verifier."""
    return [
        module.name
        for module in modules
        if module.package in ("edge_client", "cloud_verifier")
        and len(module.parts) == 2
        and module.parts[1] not in ("__init__", "__main__")
    ]


def largest_folder(modules: list[Module]) -> tuple[str, int]:
    """Returns the folder with the most modules, and how many, `__init__` and `__main__` left out."""
    counts = Counter("/".join(m.parts[:-1]) for m in modules if not m.parts[-1].startswith("__"))
    return counts.most_common(1)[0]
