"""`python -m benchmarks.house.run`: measures how the code reads and writes benchmarks/results/house.json.

`--list` prints what is missing instead: circles, loose modules, public names without a sentence.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from benchmarks.house.code import (
    circles,
    docstrings,
    function_lengths,
    largest_folder,
    loose_modules,
    num_levels,
    num_statements,
    room_graph,
)
from benchmarks.house.path import trace_path
from benchmarks.house.source import Module, import_graph, read_modules
from benchmarks.results_file import ROOT, write_results
from outrider.experiments.shared.results import Measure, at_least, at_most, judged

MAX_LEVELS = {"edge_client": 8, "cloud_verifier": 6}


def docs_words(root: Path) -> int:
    """Returns the words of README and docs, pages that say that they are generated left out."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    return sum(
        len(text.split()) for text in texts if not re.match(r".*generated", text.partition("\n")[0], re.I)
    )


def measure_rooms(modules: list[Module]) -> list[Measure]:
    """Returns levels, circles, loose modules and the largest folder."""
    found = []
    for package, bound in MAX_LEVELS.items():
        graph = room_graph(modules, package)
        upward = circles(graph)
        levels = num_levels(graph) if not upward else float("inf")
        found.append(
            judged(
                f"house.levels.{package}",
                f"rooms on the longest chain inside {package}",
                levels,
                "rooms",
                at_most(bound),
            )
        )
    folder, size = largest_folder(modules)
    found.append(
        judged(
            "house.circles", "circles of modules", len(circles(import_graph(modules))), "circles", at_most(0)
        )
    )
    found.append(
        judged(
            "house.loose",
            "modules directly in edge_client and cloud_verifier",
            len(loose_modules(modules)),
            "modules",
            at_most(12),
        )
    )
    found.append(
        judged(
            "house.largest_folder", f"modules in the largest folder, {folder}", size, "modules", at_most(18)
        )
    )
    return found


def measure_code(modules: list[Module]) -> list[Measure]:
    """Returns statements, function lengths and docstrings."""
    median, p90 = function_lengths(modules)
    total, missing = docstrings(modules)
    return [
        judged(
            "house.statements",
            "statements outside tests and generated stubs",
            num_statements(modules),
            "statements",
            at_most(33_400),
        ),
        judged(
            "house.functions.median",
            "lines of a function of the product, median",
            median,
            "lines",
            at_most(6),
        ),
        judged(
            "house.functions.p90",
            "lines of a function of the product, 90th percentile",
            p90,
            "lines",
            at_most(18),
        ),
        judged(
            "house.docstrings",
            f"share of {total} public names of the product with a sentence",
            1 - len(missing) / total,
            "share",
            at_least(0.95),
        ),
    ]


def main() -> None:
    """Runs the measures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house.run", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print what is missing, measure nothing")
    arguments = parser.parse_args()
    modules = read_modules(ROOT)
    if arguments.list:
        for line in (
            *map(" <-> ".join, circles(import_graph(modules))),
            *loose_modules(modules),
            *docstrings(modules)[1],
        ):
            print(line)
        return
    stays = trace_path()
    num_returns = len(stays) - len(set(stays))
    measures = [
        *measure_rooms(modules),
        *measure_code(modules),
        judged(
            "house.path.files", "files that a VerifyRequest passes", len(set(stays)), "files", at_most(14)
        ),
        judged("house.path.returns", "returns to a file already left", num_returns, "returns", at_most(3)),
        judged(
            "house.docs_words",
            "words written by hand in README and docs",
            docs_words(ROOT),
            "words",
            at_most(30_000),
        ),
    ]
    write_results("house", measures, {"path": stays})


if __name__ == "__main__":
    main()
