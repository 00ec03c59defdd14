"""Circles of modules, levels of rooms, loose modules and folder sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import networkx

from benchmarks.house.source import Module, import_graph


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
