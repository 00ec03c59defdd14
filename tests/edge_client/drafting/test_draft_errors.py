"""What is wrong with a directory is said in one line, at export and at opening."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_dirs import edit_json, make_chains_only, make_hf_dir, write_tokenizer

from outrider.common.errors import ModelError, OutriderError, UsageError
from outrider.edge_client.drafting.export.dropout_graph import add_dropout
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.registry import create_draft_model

Damage = Callable[[Path], Any]


def truncate_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def only_pickles(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def drop_tensor(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length].replace(b"model.norm.weight", b"model.nrom.weight")
    (path / "model.safetensors").write_bytes(data[:8] + header + data[8 + length :])


def missing_shard(path: Path) -> None:
    (path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


EXPORT_DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "config is not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "another architecture": (
        lambda d: edit_json(d / "config.json", architectures=["MambaForCausalLM"]),
        "is a MambaForCausalLM; export supports LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM",
    ),
    "rope scaling": (
        lambda d: edit_json(d / "config.json", rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        "rope scaling 'yarn'; export supports default, linear, llama3",
    ),
    "no size": (lambda d: edit_json(d / "config.json", intermediate_size=0), "intermediate_size is 0"),
    "missing size": (lambda d: edit_json(d / "config.json", vocab_size=None), "config.json"),
    "wrong size": (lambda d: edit_json(d / "config.json", intermediate_size=128), "config.json says"),
    "another activation": (lambda d: edit_json(d / "config.json", hidden_act="mish"), "activation 'mish'"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "tokenizer too large": (lambda d: write_tokenizer(d, 600), "has 600 tokens, but the embedding only 512"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no model.safetensors"),
    "only pickles": (only_pickles, "pytorch_model.bin but no safetensors"),
    "truncated weights": (lambda d: truncate_file(d / "model.safetensors"), "truncated"),
    "not safetensors": (
        lambda d: (d / "model.safetensors").write_bytes(b"x" * 200),
        "not a safetensors file, or is truncated",
    ),
    "missing tensor": (drop_tensor, "has no tensor 'model.norm.weight'"),
    "missing shard": (missing_shard, "lacks the shard model-00001-of-00002.safetensors"),
}


@pytest.fixture(scope="module")
def good_hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(tmp_path_factory.mktemp("good") / "hf", "qwen2")


def copy_dir(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def check_one_line(error: OutriderError) -> None:
    assert "\n" not in str(error)


@pytest.mark.parametrize("damage", EXPORT_DAMAGES)
def test_export_refuses_a_damaged_directory_in_one_line(
    damage: str, good_hf_dir: Path, tmp_path: Path
) -> None:
    hf_dir = copy_dir(good_hf_dir, tmp_path / "hf")
    harm, message = EXPORT_DAMAGES[damage]
    harm(hf_dir)
    with pytest.raises(ModelError) as caught:
        export_draft(hf_dir, tmp_path / "out")
    assert message in str(caught.value)
    check_one_line(caught.value)
    assert not (tmp_path / "out" / "draft.onnx").exists()


def test_export_refuses_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory"):
        export_draft(tmp_path / "nothing", tmp_path / "out")


@pytest.mark.parametrize("max_context", [-1, 0, 1])
def test_a_context_of_no_use_is_refused_by_its_flag(
    max_context: int, good_hf_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"--max-context {max_context}: want 2 tokens or more"):
        export_draft(good_hf_dir, tmp_path / "out", max_context=max_context)


def test_a_full_disk_is_said_in_one_line(good_hf_dir: Path, tmp_path: Path) -> None:
    export_draft(good_hf_dir, tmp_path / "draft")
    for name in ("draft.onnx", "draft.dropout.onnx"):
        full = copy_dir(tmp_path / "draft", tmp_path / f"full-{name}")
        (full / name).unlink(missing_ok=True)
        (full / name).symlink_to("/dev/full")
        with pytest.raises(ModelError, match=r"cannot write .*: No space left on device") as caught:
            if name == "draft.onnx":
                export_draft(good_hf_dir, full)
            else:
                add_dropout(full)
        check_one_line(caught.value)


def exchange_graph(path: Path) -> None:
    """Another graph, with its size written into draft.json."""
    graph = b"not a graph"
    (path / "draft.onnx").write_bytes(graph)
    spec = json.loads((path / "draft.json").read_text())
    edit_json(path / "draft.json", files=spec["files"] | {"draft.onnx": len(graph)})


OPEN_DAMAGES: dict[str, tuple[Damage, str]] = {
    "not exported": (lambda d: (d / "draft.json").unlink(), "is not an exported draft: it has no draft.json"),
    "another version": (lambda d: edit_json(d / "draft.json", format_version=9), "format version 9"),
    "unknown field": (lambda d: edit_json(d / "draft.json", extra=1), "malformed"),
    "no graph": (lambda d: (d / "draft.onnx").unlink(), "has no draft.onnx"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "truncated graph": (lambda d: truncate_file(d / "draft.onnx"), "truncated or exchanged"),
    "exchanged graph": (exchange_graph, "cannot be loaded"),
    "a graph for chains, said to take trees": (
        lambda d: (make_chains_only(d), edit_json(d / "draft.json", format_version=4)),
        "does not match its draft.json",
    ),
    "a graph for trees, said to take none": (
        lambda d: edit_json(d / "draft.json", format_version=3),
        "does not match its draft.json",
    ),
    "other sizes": (lambda d: edit_json(d / "draft.json", num_kv_heads=4), "does not match its draft.json"),
    "exchanged tokenizer": (
        lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text().replace("w7", "v7")),
        "is not the tokenizer the draft was exported with",
    ),
}


@pytest.mark.parametrize("damage", OPEN_DAMAGES)
def test_opening_refuses_a_damaged_draft_in_one_line(damage: str, good_hf_dir: Path, tmp_path: Path) -> None:
    export_draft(good_hf_dir, tmp_path / "draft")
    harm, message = OPEN_DAMAGES[damage]
    harm(tmp_path / "draft")
    with pytest.raises(ModelError) as caught:
        create_draft_model("model", tmp_path / "draft")
    assert message in str(caught.value)
    check_one_line(caught.value)


def test_opening_a_hugging_face_directory_says_how_to_export_it(good_hf_dir: Path) -> None:
    with pytest.raises(ModelError, match="edge-client draft export"):
        create_draft_model("model", good_hf_dir)


def test_an_unknown_strategy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'medusa'; known: model, staged, prompt-lookup, suffix"):
        create_draft_model("medusa", tmp_path)
