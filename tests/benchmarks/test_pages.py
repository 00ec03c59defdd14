"""docs/figures.md holds what benchmarks/results/*.json hold."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages


def _write(folder: Path, **measure: object) -> None:
    whole = {"id": "x.y", "measure": "a|b", "value": 5078.4, "unit": "rounds/s", "target": "", "met": None}
    machine = {"cpu": "EPYC", "cores": 2, "python": "3.11.7", "gpu": None}
    record = {"commit": "abc", "machine": machine, "command": "python -m x", "measures": [whole | measure]}
    (folder / "x.json").write_text(json.dumps(record))


def test_results_are_of_a_clean_commit_and_by_a_command_that_anybody_can_run() -> None:
    """Those of each stage and point too, which are measured by themselves."""
    wanted = {"commit": r"[0-9a-f]{12}", "command": r"(python -m [\w.]+|edge-client \w+)( [^/~]*)?"}
    refused = set()
    for path in pages.RESULTS.glob("*.json"):
        found = list(_named(json.loads(path.read_text()), set(wanted)))
        assert {name for name, _ in found} == set(wanted)
        refused |= {(path.stem, value) for name, value in found if not re.fullmatch(wanted[name], value)}
        modules = {match[1] for _, value in found if (match := re.match(r"python -m ([\w.]+)", value))}
        refused |= {(path.stem, module) for module in modules if not _is_there(module)}
    assert not refused


@pytest.mark.slow
def test_results_name_commits_that_came_before_this_one() -> None:
    """Of the stages too: a branch that was rebased has no such commit any more. Not in CI, where a branch may just have
    been rebased."""
    if not (pages.ROOT / ".git").exists() or _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this is no clone with its whole history")
    known, names = {each[:12] for each in _git("rev-list", "HEAD").split()}, {"commit", "commit_at_end"}
    unknown = {
        (path.stem, commit)
        for path in pages.RESULTS.glob("*.json")
        for _, commit in _named(json.loads(path.read_text()), names)
        if commit not in known
    }
    assert not unknown


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=pages.ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it was in
        return False


def _named(value: Any, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yields the name and text of each field with one of these names, at any depth."""
    if isinstance(value, dict):
        yield from ((name, each) for name, each in value.items() if name in names and isinstance(each, str))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _named(each, names)


def _measures() -> list[dict[str, Any]]:
    """Returns those of every file; a sweep has several with one id."""
    records = [json.loads(path.read_text()) for path in pages.RESULTS.glob("*.json")]
    return [measure for record in records for measure in record["measures"]]


def _rows(page: str, heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading, without its first two lines."""
    lines = (pages.ROOT / page).read_text().split(f"\n## {heading}\n")[1].splitlines()
    table = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: line[:1] != "|", lines)
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table][2:]


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    measures, others = {each["id"]: each for each in _measures()}, {}
    for _, id, _, shown, target in _rows("README.md", "Measured"):
        measure, number = measures[id.strip("`")], shown.removesuffix(" %").replace(",", "")
        value = measure["value"] * (100 if shown.endswith("%") else 1)
        decimals = len(number.partition(".")[2])
        if f"{value:.{decimals}f}" != number or (measure["met"] is False) != ("missed" in target):
            others[id] = (shown, target, value)
    assert not others


def test_the_table_of_missed_targets_names_what_is_missed_and_nothing_else() -> None:
    missed = {each["id"] for each in _measures() if each["met"] is False}
    rows = _rows("docs/benchmarks.md", "Missed targets")
    assert {id for row in rows for id in re.findall(r"`([^`]+)`", row[0])} == missed


def test_the_page_of_figures_is_up_to_date() -> None:
    assert pages.main(["--check"]) == 0, "docs/figures.md is out of date: run `make pages`"


def test_a_missed_target_is_shown_and_a_bar_in_a_measure_is_escaped(tmp_path: Path) -> None:
    _write(tmp_path, target=">= 6000", met=False)
    assert r"| `x.y` | 5,078 rounds/s | >= 6000 | **missed** | a\|b |" in pages.render_page(tmp_path)


def test_a_sweep_is_a_line_a_cell_and_what_was_not_measured_is_empty(tmp_path: Path) -> None:
    names = "id,tpot_ms,tpot_ms_low,tpot_ms_high,ttft_ms,tokens_per_round,acceptance_rate"
    (tmp_path / "s.csv").write_text(f"{names}\n1 ms cloud-only,8.6298,7.1,10.17,26.45,,\n")
    assert "| 1 ms cloud-only | 8.63 (7.1–10.17) | 26.45 |  |  |" in pages.render_page(tmp_path)


def test_check_fails_where_a_result_changed_after_the_page_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PAGE", tmp_path / "figures.md")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    _write(tmp_path)
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
    _write(tmp_path, value=5079.4)
    assert pages.main(["--check"]) == 1


def test_a_stages_own_table_comes_after_its_measures(tmp_path: Path) -> None:
    _write(tmp_path)
    record = json.loads((tmp_path / "x.json").read_text())
    table = {"title": "Tokens a second", "columns": ["sessions", "a way"], "rows": [["1", "20"], ["8", "30"]]}
    (tmp_path / "x.json").write_text(json.dumps(record | {"details": {"stage": {"tables": [table]}, "n": 3}}))
    page = pages.render_page(tmp_path)
    lines = "Tokens a second:\n\n| sessions | a way |\n|---|---|\n| 1 | 20 |\n| 8 | 30 |\n"
    assert lines in page and page.index(lines) > page.index("`x.y`")


def test_the_commands_of_stages_are_shown_where_they_differ(tmp_path: Path) -> None:
    _write(tmp_path)
    record = json.loads((tmp_path / "x.json").read_text())
    first, last = (
        {"commit": "aaa", "command": "python -m x --long"},
        {"commit": "abc", "command": "python -m x"},
    )
    older = {"commit": "bbb"}  # which has none

    def render(**stages: object) -> str:
        (tmp_path / "x.json").write_text(json.dumps(record | {"details": stages}))
        return pages.render_page(tmp_path)

    lines = "| stage | commit | command |\n|---|---|---|\n| one | `aaa` | `python -m x --long` |\n"
    assert f"{lines}| two | `abc` | `python -m x` |\n" in render(one=first, old=older, two=last)
    assert "| stage |" not in render(one=last, old=older, two=last)


def test_a_commit_that_was_made_during_a_run_is_shown(tmp_path: Path) -> None:
    _write(tmp_path)
    record = json.loads((tmp_path / "x.json").read_text())
    (tmp_path / "x.json").write_text(json.dumps(record | {"commit_at_end": "abd"}))
    assert "Commit `abc`, `abd` at the end; EPYC" in pages.render_page(tmp_path)
