"""A command whose extra is not installed says in one line which one it needs, and exits with 2."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.common.process.extras import MissingExtraError, needs_extra
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
EDGE, CLOUD = "outrider.edge_client.commands.cli", "outrider.cloud_verifier.server.cli"


@pytest.mark.parametrize(
    ("command", "package", "arguments", "says"),
    [
        (EDGE, "onnxruntime", "run hello", "drafting needs onnxruntime: pip install 'outrider[edge]'"),
        (EDGE, "tokenizers", "run hello", "run needs tokenizers: pip install 'outrider[edge]'"),
        (EDGE, "tokenizers", "chat", "chat needs tokenizers: pip install 'outrider[edge]'"),
        (EDGE, "tokenizers", "doctor", "doctor needs tokenizers: pip install 'outrider[edge]'"),
        (
            *(EDGE, "tokenizers", "calibrate --out {tmp}/gate.yaml"),
            "calibrate needs tokenizers: pip install 'outrider[edge]'",
        ),
        (EDGE, "shtab", "completion bash", "completion needs shtab: pip install 'outrider[edge]'"),
        (EDGE, "rich", "run --live hello", "--live needs rich: pip install 'outrider[live]'"),
        (
            *(EDGE, "opentelemetry", "run hello --otlp-endpoint http://127.0.0.1:1"),
            "--otlp-endpoint needs opentelemetry: pip install 'outrider[otel]'",
        ),
        (EDGE, "starlette", "serve", "serve needs starlette: pip install 'outrider[daemon]'"),
        (EDGE, "greenlet", "bench --no-report {tmp}/s.yaml --out {tmp}/o", "greenlet: pip install 'outrider[bench]'"),
        (EDGE, "onnx", "draft export {tmp} {tmp}/draft", "draft export needs onnx: pip install 'outrider[export]'"),
        (
            *(EDGE, "torch", "run hello --draft-backend torch"),
            "--draft-backend torch needs torch: pip install 'outrider[edge-torch]'",
        ),
        (
            *(EDGE, "torch", "draft export {tmp} {tmp}/draft --self-check"),
            "draft export --self-check needs torch: pip install 'outrider[edge-torch]'",
        ),
        (
            *(CLOUD, "torch", "serve --listen 127.0.0.1:0 --admin-listen none"),
            "serve needs torch: pip install 'outrider[cloud]'",
        ),
        (CLOUD, "cryptography", "cert dev", "cert needs cryptography: pip install 'outrider[cloud]'"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(
    tmp_path: Path, command: str, package: str, arguments: str, says: str
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
    assert line.endswith(says) and "Traceback" not in process.stderr and len(before) <= 1


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
    with pytest.raises(MissingExtraError, match=r"run needs no_such_package: pip install 'outrider\[edge\]'"):
        with needs_extra("edge", "run"):
            import no_such_package.part  # type: ignore[import-not-found]  # noqa: F401
