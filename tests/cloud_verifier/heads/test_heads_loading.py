"""Directories of heads: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import HIDDEN, make_heads
from support.models import make_tiny_target

from benchmarks.heads.service import CLOUD_ONLY, Case, Service
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.quantised import four_bit
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.heads.loading import load_head, load_heads
from outrider.cloud_verifier.heads.modules import MedusaHead
from outrider.cloud_verifier.server.loading import load_models
from outrider.common.errors import ModelError, OutriderError
from outrider.common.models.fingerprint import target_fingerprint
from outrider.common.types import SamplingParams


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> PagedBackend:
    return load_target(make_tiny_target(tmp_path_factory.mktemp("target")))


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_medusas_own_layout_is_read_with_its_output_embeddings(backend: PagedBackend, tmp_path: Path) -> None:
    directory = make_heads(tmp_path, "medusa")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    for k in range(3):
        tensors[f"{k}.1.weight"] = torch.full((backend.vocab_size, HIDDEN), float(k))
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1}))
    head = load_head(directory, backend)
    assert (head.name, head.facts.max_depth) == ("medusa", 3)
    last = list(head.weights.children())[-1]
    assert isinstance(last, MedusaHead) and last.output is not None
    assert torch.equal(last.output.weight, tensors["2.1.weight"])
    assert torch.equal(last.get_parameter("blocks.0.linear.bias"), tensors["2.0.linear.bias"])


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (lambda d: d.rename(d.parent / "elsewhere"), "config.json cannot be read"),
    "no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "no object": (lambda d: (d / "config.json").write_text("[]"), "config.json is not an object"),
    "another kind": (
        lambda d: change_config(d, outrider={"kind": "sequoia"}),
        "kind is 'sequoia'; want one of medusa, hydra",
    ),
    "no model of heads": (
        lambda d: (d / "config.json").write_text('{"model_type": "llama"}'),
        "of no layout that is read",
    ),
    "a strange count": (
        lambda d: change_config(d, medusa_num_heads="3"),
        "medusa_num_heads is '3'; want a number",
    ),
    "more heads than weights": (
        lambda d: change_config(d, medusa_num_heads=4),
        "3.0.linear.weight is missing",
    ),
    "fewer heads than weights": (
        lambda d: change_config(d, medusa_num_heads=2),
        "medusa_num_heads is 2, and the file has 3 heads: correct config.json",
    ),
    "another size": (
        lambda d: change_tensors(d, lambda t: t.update({"1.0.linear.weight": torch.zeros(64, 64)})),
        r"1.0.linear.weight is \[64, 64\]; the target and config.json want \[128, 128\]",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
    "torn weights": (
        lambda d: (d / "model.safetensors").write_bytes(b"torn"),
        "model.safetensors cannot be read",
    ),
    "pickled weights": (
        lambda d: (d / "model.safetensors").rename(d / "medusa_lm_head.pt"),
        "medusa_lm_head.pt is pickled, which is never loaded",
    ),
    "another target": (
        lambda d: change_config(d, outrider={"kind": "medusa", "target_fingerprint": "f" * 64}),
        "trained for the target ffffffffffff, and this one is",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_damaged_directory_is_refused_by_name(what: str, backend: PagedBackend, tmp_path: Path) -> None:
    directory = make_heads(tmp_path / "heads", "medusa")
    damage, message = WRONG[what]
    damage(directory)
    with pytest.raises(OutriderError, match=message) as caught:
        load_head(directory, backend)
    assert f"--heads {directory}" in str(caught.value)


def test_heads_of_a_target_whose_states_are_not_scored_as_they_are_are_refused(tmp_path: Path) -> None:
    """BERT changes them once more before its output embedding."""
    target = make_tiny_target(tmp_path / "target", "bert", is_decoder=True, num_key_value_heads=4)
    heads = make_heads(tmp_path / "heads", "medusa")
    with pytest.raises(ModelError, match=f"--heads {heads}: .*target cannot have heads: .*a logit is off by"):
        load_head(heads, load_target(target, kv_tokens=256, exact_rows="off"))


def test_two_directories_of_a_kind_are_refused(backend: PagedBackend, tmp_path: Path) -> None:
    directory = make_heads(tmp_path / "heads", "medusa")
    with pytest.raises(OutriderError, match="a second directory of medusa"):
        load_heads([directory, directory], backend)


def test_the_pool_leaves_room_for_heads_their_kv_and_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing or damaged is refused when the heads are loaded."""
    heads, damaged = make_heads(tmp_path / "heads", "medusa"), make_heads(tmp_path / "damaged", "medusa")
    (damaged / "model.safetensors").write_bytes(b"torn")
    num_weights = sum(each.numel() for each in load_file(heads / "model.safetensors").values())
    asked: list[object] = []

    def load(*_: object, **options: object) -> None:
        asked.append(options["heads_bytes"])
        raise ModelError("no target here")

    monkeypatch.setattr("outrider.cloud_verifier.backends.loading.load_target", load)
    for dtype, number_bytes in (("auto", 2), ("float32", 4)):
        config = ServeConfig(device="cuda", dtype=dtype, draft_kv_memory="3MiB")
        for paths in ((), (str(heads), str(damaged), str(tmp_path / "missing"))):
            with pytest.raises(ModelError, match="no target here"):
                load_models(replace(config, heads=paths), None)
        assert asked[-2:] == [0, (12 << 20) + number_bytes * num_weights]


def test_heads_that_do_not_fit_on_the_device_are_refused_by_name(
    backend: PagedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    directory = make_heads(tmp_path / "heads", "medusa")
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(
        ModelError, match=f"--heads {directory}: no memory is left for it on cpu: lower --kv-memory"
    ):
        load_head(directory, backend)


@pytest.mark.skipif(not four_bit.is_installed(), reason="needs the extra quant")
def test_heads_of_a_target_draft_for_it_with_nf4_weights_too(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target")
    quantised = load_target(target, quantize="nf4", kv_bytes=16 << 20)
    heads = make_heads(tmp_path / "heads", "medusa")
    of_target = {"kind": "medusa", "target_fingerprint": target_fingerprint(target)}
    change_config(heads, outrider=of_target)
    service = Service(quantised, [load_head(heads, quantised)])
    case = Case((5, 6, 7, 8), SamplingParams(temperature=0.8, seed=3), "medusa", 12)
    alone, drafted = service.write([replace(case, source=CLOUD_ONLY), case], 24)
    assert quantised.is_reproducible and drafted.token_ids == alone.token_ids
    change_config(heads, outrider={**of_target, "target_fingerprint": "another"})
    with pytest.raises(OutriderError, match="trained for the target another"):
        load_head(heads, quantised)
