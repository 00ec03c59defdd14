"""`make bench-real`: what its stages make of what they see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.real import rss, start
from benchmarks.real.demo import size_gb


def test_start_up_is_a_ratio_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "_serve_s", lambda: 3.0)
    monkeypatch.setattr(start, "_import_s", lambda: 2.0)
    (measure,), details = start.run(num_turns=3)
    assert (measure.id, measure.value, measure.met) == ("real.start", 1.5, True)
    assert details["turns_s"] == [[2.0, 3.0, 2.0]] * 3 and details["imports_a_a"] == 1.0


def test_resident_memory_is_read_in_megabytes() -> None:
    found = rss.resident_mb(Path("/proc/self/status").read_text())
    assert found["VmRSS"] >= max(found["RssAnon"], found["RssFile"]) > 0
    status = "Name:\tx\nVmRSS:\t  1000 kB\nRssAnon:\t 900 kB\nRssFile:\t 100 kB\n"
    assert rss.resident_mb(status) == {"VmRSS": 1.0, "RssAnon": 0.9, "RssFile": 0.1}


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(bytes(5000))
    before = size_gb(tmp_path)
    os.link(tmp_path / "sub" / "a", tmp_path / "b")
    assert size_gb(tmp_path) == before >= 5e-6
