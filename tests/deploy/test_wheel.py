"""The wheel: one top-level name, beside Hugging Face's `kernels` in both orders, and the commands outside a clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ci]

ROOT = Path(__file__).resolve().parents[2]
# Without a path to the clone: there `kernels` would be ours, which setuptools takes for Hugging Face's.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
_NOT_INSTALLED = ("training/judge/", "training/pair/", "training/target/")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds from a copy of the tracked files, since a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.split("\0"):
        if name and not name.startswith(("tests/", "docs/", "benchmarks/")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", str(source), *flags], env=_ENVIRONMENT, check=True, timeout=120
    )
    [built] = out.glob("*.whl")
    return built


class Environment:
    """A fresh virtual environment. Packages that ours needs are found where the tests' own are."""

    def __init__(self, path: Path) -> None:
        venv.create(path, with_pip=False)
        self.python = path / "bin" / "python"
        [self.site] = path.glob("lib/python*/site-packages")
        (self.site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install_wheel(self, wheel: Path) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            "--no-index",
            "--no-deps",
        ]
        subprocess.run(
            [*pip, "--quiet", "--no-compile", str(wheel)], env=_ENVIRONMENT, check=True, timeout=120
        )

    def install_hugging_face_kernels(self) -> None:
        for file in distribution("kernels").files or ():
            if ".." not in file.parts:
                (self.site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(str(file.locate())), self.site / file)

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.site.parent,
            env=_ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_the_wheel_holds_one_package_with_the_pair_and_nothing_of_ours_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"outrider"}
    inside = {name.removeprefix("outrider/") for name in names}
    assert not [name for name in inside if name.startswith(_NOT_INSTALLED)]
    for needed in (
        "py.typed",
        "models/embedded/draft/draft.onnx",
        "models/embedded/target/tokenizer.json",
        "edge_client/daemon/http/page.html",
        "experiments/sweep/example.yaml",
        "experiments/report/page.css",
        "experiments/shared/traces/embedded.npz",
        "experiments/simulator/times/embedded-2-cores.json",
        "training/distill.py",
    ):
        assert needed in inside, needed
    weights = [name for name in inside if name.endswith(".safetensors")]
    assert len(weights) == 3 + 2, weights  # shards of the target, and two kinds of heads


_FIRST_WHEEL = (Environment.install_wheel, lambda env, _: env.install_hugging_face_kernels())
_FIRST_KERNELS = tuple(reversed(_FIRST_WHEEL))


@pytest.mark.parametrize("order", [_FIRST_WHEEL, _FIRST_KERNELS], ids=["wheel first", "kernels first"])
def test_beside_hugging_faces_kernels_both_work(
    environment: Environment, wheel: Path, order: tuple[Callable[[Environment, Path], None], ...]
) -> None:
    for install in order:
        install(environment, wheel)
    code = (
        "import kernels, outrider, outrider.kernels.reference; from kernels import get_kernel; "
        "print(kernels.__file__, outrider.__file__)"
    )
    found = environment.run(str(environment.python), "-c", code).split()
    assert all(Path(each).is_relative_to(environment.site) for each in found), found


def test_outside_a_clone_both_commands_run_with_the_embedded_pair(
    environment: Environment, wheel: Path
) -> None:
    environment.install_wheel(wheel)
    # The kernels would be compiled for 10 s, which other tests have seen; without numba their reference serves.
    (environment.site / "numba.py").write_text("raise ImportError('not in this test')")
    commands = environment.python.parent
    serve = [str(commands / "cloud-verifier"), "serve", "--listen", "127.0.0.1:0", "--admin-listen", "none"]
    server = subprocess.Popen(
        serve, cwd=environment.site.parent, env=_ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        ready = re.search(r"127\.0\.0\.1:\d+", server.stdout.readline())
        assert ready is not None
        flags = ("--verifier", ready[0], "--max-new-tokens", "8", "--on-timeout", "wait", "--json")
        report = json.loads(environment.run(str(commands / "edge-client"), "run", "def f(x):", *flags))
        assert report["exact"] and report["stats"]["num_tokens"] >= 1
    finally:
        server.terminate()
        server.communicate(timeout=60)
