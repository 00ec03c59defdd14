"""Kernels are compiled in processes of their own, kept on disk, and compiled again after a source has changed."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider import kernels
from outrider.kernels.host import compiler

PROBE = """
import logging
from numba import types
from outrider.kernels.host.compiler import jit
from outrider.kernels.host.rows.noise import gumbel

logging.basicConfig(format="%(message)s")

@jit(types.float64(types.uint32))
def probe(lane):
    return gumbel(lane)

print(probe(7), sum(probe.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the kernels with one small kernel for layers and one for rows, which compile quickly."""
    copy, own = tmp_path / "outrider" / "kernels", Path(kernels.__file__).parent
    (copy / "host" / "rows").mkdir(parents=True)
    for name in ("host/compiler.py", "host/rows/noise.py", "host/rows/masks.py"):
        shutil.copy(own / name, copy / name)
    for init in (tmp_path / "outrider", copy, copy / "host", copy / "host" / "rows"):
        (init / "__init__.py").write_text("")
    (copy / "host" / "probe.py").write_text(PROBE)
    return copy


def run_probe(package, cache_parent, folder="."):
    """The kernel's result and how often it came from disk, in a process of its own; and what was logged."""
    run = subprocess.run(
        [sys.executable, "-P", "-c", "import outrider.kernels.host.probe"],
        cwd=package.parents[1] / folder,
        env=os.environ | {"PYTHONPATH": str(package.parents[1]), "NUMBA_CACHE_DIR": str(cache_parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    value, num_hits = run.stdout.split()
    return float(value), int(num_hits), run.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_kernels_come_from_disk_and_a_changed_helper_in_another_file_is_seen(package, tmp_path):
    first, num_hits, logged = run_probe(package, tmp_path / "cache")
    assert (num_hits, logged) == (1, "")  # another process compiled it
    (folder,) = (tmp_path / "cache").iterdir()
    assert {path.name.partition(".")[0] for path in folder.rglob("*.nbi")} == {"masks", "probe"}
    assert run_probe(package, tmp_path / "cache")[:2] == (first, 1)
    shutil.rmtree(folder)
    folder.mkdir()  # as if that process had been killed
    assert run_probe(package, tmp_path / "cache")[:2] == (first, 0)
    helpers = package / "host" / "rows" / "noise.py"
    source = helpers.read_text()
    helpers.write_text(source.replace("return -math.log(", "return 1000.0 - math.log("))
    assert helpers.read_text() != source
    assert run_probe(package, tmp_path / "cache")[:2] == (pytest.approx(1000 + first), 1)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("folder", [".", "rows"])
def test_where_another_process_fails_kernels_are_compiled_here(folder, package, tmp_path):
    (package / "host" / folder / "other.py").write_text("raise RuntimeError('planted')")
    _, num_hits, logged = run_probe(package, tmp_path / "cache")
    assert num_hits == (folder == "rows")
    assert "ended with 1" in logged and "Traceback" not in logged
    assert "planted" in logged


@pytest.mark.slow
@pytest.mark.ci
def test_another_process_takes_no_module_from_the_current_folder(package, tmp_path):
    (package.parents[1] / "elsewhere").mkdir()
    (package.parents[1] / "elsewhere" / "numba.py").write_text("raise RuntimeError('not the library')")
    _, num_hits, logged = run_probe(package, tmp_path / "cache", "elsewhere")
    assert (num_hits, logged) == (1, "")


@pytest.mark.slow
@pytest.mark.ci
def test_where_nothing_can_be_written_kernels_work_and_one_line_is_logged(package, tmp_path):
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        _, num_hits, logged = run_probe(package, tmp_path / "file" / "cache")
        assert num_hits == 0
        assert logged.count("the kernels are compiled again at every start") == 1


def test_ctrl_c_while_another_process_compiles_is_no_warning(monkeypatch, tmp_path, caplog):
    def run(command, **options):
        raise subprocess.CalledProcessError(-signal.SIGINT, command, stderr="Traceback\nKeyboardInterrupt\n")

    monkeypatch.setattr(subprocess, "run", run)
    compiler._fill(tmp_path)
    assert not caplog.records


def test_threads_that_import_kernels_at_once_all_find_the_folder(monkeypatch):
    """numba has one CACHE_DIR for all threads; where another thread had put it back, code landed in the current
    folder."""
    found, durations = [], iter((5, 10, 15, 20))

    def njit(*_, **options):
        seen = [compiler.config.CACHE_DIR]
        for _ in range(next(durations)):
            time.sleep(0.001)
            seen.append(compiler.config.CACHE_DIR)
        found.append(set(seen))
        return lambda function: function

    before = compiler.config.CACHE_DIR
    monkeypatch.setattr(compiler.numba, "njit", njit)
    threads = [threading.Thread(target=compiler.jit("void()"), args=(len,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{str(compiler._cache_folder())}] * 4
    assert before == compiler.config.CACHE_DIR
