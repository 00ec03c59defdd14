"""A model directory is data: neither pickles nor code in it run, however they are named."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from support.edge.tiny_draft import make_tiny_draft
from support.models import edit_config, make_tiny_target

from outrider.cloud_verifier.backends.loading import load_target
from outrider.common.errors import ModelError
from outrider.edge_client.drafting.export.exporter import export_draft

RUNS_CODE = re.compile(
    r"import pickle|torch\.load\(|allow_pickle=True|trust_remote_code=True|(?<![\w.])(?:eval|exec)\("
)


class Trap:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._path),)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target") / "model", hidden=64, num_layers=1)


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """Where the trap's directory would be."""
    return tmp_path / "sprung"


def plant(model: Path, sprung: Path, *names: str) -> None:
    for name in names:
        (model / name).write_bytes(pickle.dumps({"weight": Trap(sprung)}))
    code = f"import os\nos.mkdir({str(sprung)!r})\n"
    for name in ("modeling_llama.py", "configuration_llama.py", "tokenization_llama.py", "__init__.py"):
        (model / name).write_text(code)


def test_the_trap_works(model: Path, sprung: Path) -> None:
    plant(model, sprung, "pytorch_model.bin")
    pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert sprung.is_dir()


def test_pickles_and_code_beside_safetensors_are_ignored(model: Path, sprung: Path) -> None:
    plant(model, sprung, "pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pth")
    maps = {"AutoModelForCausalLM": "modeling_llama.Mine", "AutoConfig": "configuration_llama.Mine"}
    edit_config(model, auto_map=maps)
    assert load_target(model, kv_tokens=256).num_tokens
    export_draft(model, model.parent / "draft")
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickles_alone_are_refused_by_name(model: Path, sprung: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    plant(model, sprung, name)
    with pytest.raises(ModelError, match=f"{name}: pickled weights can run code and are not loaded"):
        load_target(model)
    with pytest.raises(ModelError, match=f"{name} but no safetensors; only safetensors"):
        export_draft(model, model.parent / "draft")
    assert not sprung.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../elsewhere.safetensors", "/etc/passwd"])
def test_an_index_names_safetensors_of_its_own_directory_only(model: Path, sprung: Path, name: str) -> None:
    plant(model, sprung, "pytorch_model.bin")
    (model / "model.safetensors").rename(model / "other.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "other.safetensors", "model.norm.weight": name}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index.json names .*, which is no safetensors file beside it"):
        load_target(model)
    with pytest.raises(ModelError, match=r"index.json names .*, which is no safetensors file beside it"):
        export_draft(model, model.parent / "draft")
    assert not sprung.exists()


def test_a_pickle_called_safetensors_is_none(model: Path, sprung: Path) -> None:
    (model / "model.safetensors").write_bytes(pickle.dumps({"weight": Trap(sprung)}))
    with pytest.raises(ModelError):
        load_target(model)
    with pytest.raises(ModelError):
        export_draft(model, model.parent / "draft")
    assert not sprung.exists()


def test_the_search_finds_code_that_runs_code() -> None:
    found = ["x = eval(text)", "exec(code)", "torch.load(path)", "import pickle"]
    assert all(RUNS_CODE.search(line) for line in found)
    assert not any(RUNS_CODE.search(line) for line in ("model.eval()", "def draft_retrieval(name):"))


def test_nothing_of_ours_unpickles(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    found = [
        f"{path.relative_to(root)}: {match[0]}"
        for package in ("common", "edge_client", "cloud_verifier", "kernels")
        for path in (root / package).rglob("*.py")
        for match in RUNS_CODE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found
    draft = make_tiny_draft(tmp_path)
    assert not [path for path in draft.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".npy")]
