"""A command whose extra is not installed says in one line which one it needs, and exits with 2."""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.common.process.extras import MissingExtraError, how_to_install, needs_extra
from outrider.common.process.hub_kernels import without_hub_kernels

ROOT = Path(__file__).resolve().parents[2]
_WITHOUT = """
import importlib, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[2]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[3:]))
"""
README = "install the extra 'daemon' as the README has it (Ten minutes)"
EDGE, CLOUD = "outrider.edge_client.commands.cli", "outrider.cloud_verifier.server.cli"


@pytest.mark.parametrize(
    ("command", "package", "arguments", "says", "extra"),
    [
        (EDGE, "onnxruntime", "run hello", "drafting needs onnxruntime", "edge"),
        (EDGE, "tokenizers", "run hello", "run needs tokenizers", "edge"),
        pytest.param(EDGE, "tokenizers", "chat", "chat needs tokenizers", "edge", marks=pytest.mark.slow),
        pytest.param(EDGE, "tokenizers", "doctor", "doctor needs tokenizers", "edge", marks=pytest.mark.slow),
        pytest.param(
            *(EDGE, "tokenizers", "calibrate --out {tmp}/gate.yaml"),
            *("calibrate needs tokenizers", "edge"),
            marks=pytest.mark.slow,
        ),
        (EDGE, "shtab", "completion bash", "completion needs shtab", "edge"),
        (EDGE, "rich", "run --live hello", "--live needs rich", "live"),
        (
            *(EDGE, "opentelemetry", "run hello --otlp-endpoint http://127.0.0.1:1"),
            *("--otlp-endpoint needs opentelemetry", "otel"),
        ),
        (EDGE, "starlette", "serve", "serve needs starlette", "daemon"),
        (EDGE, "greenlet", "bench --no-report {tmp}/s.yaml --out {tmp}/o", "greenlet", "bench"),
        (EDGE, "onnx", "draft export {tmp} {tmp}/draft", "draft export needs onnx", "export"),
        (
            *(EDGE, "torch", "run hello --draft-backend torch"),
            *("--draft-backend torch needs torch", "edge-torch"),
        ),
        (
            *(EDGE, "torch", "draft export {tmp} {tmp}/draft --self-check"),
            *("draft export --self-check needs torch", "edge-torch"),
        ),
        (
            *(CLOUD, "torch", "serve --listen 127.0.0.1:0 --admin-listen none"),
            *("serve needs torch", "cloud"),
        ),
        (CLOUD, "cryptography", "cert dev", "cert needs cryptography", "cloud"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(
    tmp_path: Path, command: str, package: str, arguments: str, says: str, extra: str
) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: x\nlinks: [loopback]\nmodels: synthetic\nrealisation: simulated\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", _WITHOUT, command, package, *arguments.format(tmp=tmp_path).split()],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 2, process.stderr
    *before, line = process.stderr.splitlines()
    assert (
        line.endswith(f"{says}: {how_to_install(extra)}")
        and "Traceback" not in process.stderr
        and len(before) <= 1
    )


def test_bitsandbytes_downloads_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Hub:
        @staticmethod
        def get_kernel(name: str, **_: Any) -> None:
            asked.append(name)

    monkeypatch.setitem(sys.modules, "kernels", Hub)  # type: ignore[arg-type]
    with without_hub_kernels(), pytest.raises(ImportError):
        importlib.import_module("kernels")  # as bitsandbytes.backends.cpu.ops does
    assert sys.modules["kernels"] is Hub and not asked  # type: ignore[comparison-overlap]


def test_a_module_of_our_own_that_is_missing_is_a_bug() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needs_extra("edge", "run"):
        import outrider.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    says = re.escape(f"run needs no_such_package: {how_to_install('edge')}")
    with pytest.raises(MissingExtraError, match=says):
        with needs_extra("edge", "run"):
            import no_such_package.part  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize(
    ("origin", "says"),
    [
        ({"url": "file://{here}", "dir_info": {"editable": True}}, "pip install -e '.[daemon]' in {here}"),
        ({"url": "file://{here}", "dir_info": {}}, "pip install '.[daemon]' in {here}"),
        ({"url": "file://{here}/gone", "dir_info": {"editable": True}}, README),
        ({"url": "file://{here}/outrider-0.1.0.whl", "archive_info": {}}, README),
        ({"url": "https://example.org/outrider.git", "vcs_info": {}}, README),
        (None, README),
    ],
    ids=["editable", "directory", "gone", "wheel", "git", "index"],
)
def test_an_extra_is_installed_as_this_copy_was(
    origin: dict[str, object] | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "a clone"
    here.mkdir()
    (here / "pyproject.toml").touch()
    told = None if origin is None else json.dumps(origin).replace("{here}", here.as_uri()[len("file://") :])

    class Installed:
        def __init__(self, told: str | None) -> None:
            self._told = told

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return self._told

    found = [Installed(None), Installed(told)]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: found)
    assert how_to_install("daemon") == says.format(here=here)


def test_no_line_names_a_package_index_that_has_nothing_of_ours() -> None:
    rooms = (
        "common",
        "edge_client",
        "cloud_verifier",
        "experiments",
        "benchmarks",
        "training",
        "kernels",
        "outrider",
    )
    files = [each for room in rooms for each in (ROOT / room).rglob("*.py")]
    assert files and not [each for each in files if "pip install 'outrider" in each.read_text()]
