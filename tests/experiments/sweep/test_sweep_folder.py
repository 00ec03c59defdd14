"""A results folder is written row by row, survives a crash, and is gone on with only by its own sweep."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import make_request, make_round, make_visit

from outrider.common.errors import UsageError
from outrider.experiments.sweep.machine import EnergyMeter
from outrider.experiments.sweep.results.folder import create_folder, resume_folder
from outrider.experiments.sweep.results.records import (
    MANIFEST,
    REQUESTS,
    ROUNDS,
    SCHEMA,
    Manifest,
    RequestRow,
    read_results,
    read_rows,
)

CONFIG: dict[str, Any] = {"name": "x", "repeats": 3}


def make_manifest() -> Manifest:
    return Manifest("x", "abc", False, "bench", CONFIG, {}, {}, {}, {}, [], "2026-01-01T00:00:00+00:00")


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    folder = create_folder(tmp_path / "out", make_manifest())
    request, rounds, visit = make_request(), [make_round(4, 2), make_round(4, 4)], make_visit()
    folder.add_request(request, rounds)
    folder.add_visit(visit)
    folder.update_manifest(finished="later")
    results = read_results(folder.path)
    assert (results.requests, results.rounds, results.visits) == ([request], rounds, [visit])
    assert results.manifest == dataclasses.replace(make_manifest(), finished="later")
    assert results.sweep is None


def test_a_folder_with_results_is_not_written_over(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, make_manifest())
    create_folder(tmp_path, make_manifest())  # nothing was run: nothing is lost
    folder.add_request(make_request(), [])
    with pytest.raises(UsageError, match="--resume, or give another --out"):
        create_folder(tmp_path, make_manifest())


def test_resuming_keeps_what_is_done_and_drops_what_failed_or_was_cut_off(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, make_manifest())
    done, failed = make_request(prompt="a"), make_request(prompt="b", error="lost the connection")
    folder.add_request(done, [make_round(4, 2, request=done.request)])
    folder.add_request(failed, [make_round(4, 0, request=failed.request)])
    with (tmp_path / ROUNDS).open("a") as file:
        file.write(json.dumps({"request": "c/0/0/z", "cell": "c"})[:-3])  # a crash in the middle of a line
    again = resume_folder(tmp_path, CONFIG, {})
    assert again.done == {done.request}
    assert [row.request for row in read_rows(tmp_path / REQUESTS, RequestRow)] == [done.request]
    assert [row.request for row in read_results(tmp_path).rounds] == [done.request]
    retried = dataclasses.replace(failed, error="")
    again.add_request(retried, [])
    assert read_results(tmp_path).requests == [done, retried]


def test_resuming_runs_a_visit_of_several_sessions_again_as_a_whole(tmp_path: Path) -> None:
    """The two requests that are left of sixteen would have the verifier to themselves."""
    folder = create_folder(tmp_path, make_manifest())
    whole = [make_request(repeat=0, prompt=prompt) for prompt in "ab"]
    cut_off, alone = make_request(repeat=1, prompt="a"), make_request(cell="alone", repeat=1, prompt="a")
    for request in (*whole, cut_off, alone):
        folder.add_request(request, [make_round(4, 2, request=request.request)])
    for repeat in (0, 1):
        folder.add_visit(make_visit(repeat=repeat))
    cell = whole[0].cell
    again = resume_folder(tmp_path, CONFIG, {cell: 2})
    kept = [*whole, alone]
    assert again.done == {row.request for row in kept}
    results = read_results(tmp_path)
    assert results.requests == kept and [row.request for row in results.rounds] == [
        row.request for row in kept
    ]
    assert results.visits == [make_visit(repeat=0)]


def test_another_sweep_may_not_go_on_in_the_folder_and_the_key_is_named(tmp_path: Path) -> None:
    create_folder(tmp_path, make_manifest())
    with pytest.raises(UsageError, match="made with repeats: 3, not 5"):
        resume_folder(tmp_path, CONFIG | {"repeats": 5}, {})
    with pytest.raises(UsageError, match="holds no results"):
        resume_folder(tmp_path / "elsewhere", CONFIG, {})


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    create_folder(tmp_path, make_manifest())
    record = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(record | {"schema": SCHEMA + 1}))
    with pytest.raises(UsageError, match=f"schema {SCHEMA + 1}; this program reads schema {SCHEMA}"):
        read_results(tmp_path)


def test_a_reader_passes_over_keys_it_does_not_know(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, make_manifest())
    folder.add_request(make_request(), [])
    text = (tmp_path / REQUESTS).read_text()
    (tmp_path / REQUESTS).write_text(text.replace('{"cell"', '{"of_the_future": 1, "cell"'))
    assert read_results(tmp_path).requests == [make_request()]


def test_rows_of_many_threads_stay_whole(tmp_path: Path) -> None:
    folder = create_folder(tmp_path, make_manifest())

    def write(session: int) -> None:
        for repeat in range(20):
            id = f"c/{repeat}/{session}/p"
            folder.add_request(make_request(repeat=repeat, request=id), [make_round(4, 2, request=id)])

    threads = [threading.Thread(target=write, args=(session,)) for session in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = read_results(tmp_path)
    assert len(results.requests) == len(results.rounds) == 80


def test_energy_is_counted_where_counters_are_and_absent_where_not(tmp_path: Path) -> None:
    meter = EnergyMeter(tmp_path)
    meter.start()
    assert meter.stop() is None
    zones = (
        ("intel-rapl:0", "package-0", 900),
        ("intel-rapl:0:0", "core", 5),
        ("intel-rapl:1", "package-1", 50),
        ("intel-rapl:2", "psys", 7),  # the packages once more
    )
    for place, name, now in zones:
        zone = tmp_path / place
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text(f"{now}000000")
        (zone / "max_energy_range_uj").write_text("1000000000")
    meter = EnergyMeter(tmp_path)
    meter.start()
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("10000000")  # it ran over
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("53000000")
    assert meter.stop() == 110 + 3
