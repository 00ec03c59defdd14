"""The draft in PyTorch: transformers' probabilities, rollback by length, trees, quantised weights and KV."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draft_dirs import edit_json, make_hf_dir
from safetensors.torch import load_file, save_file
from support.models import WINDOWED, add_token, make_tiny_target
from transformers import AutoModelForCausalLM

from outrider.common.errors import InvalidFieldError, ModelError, UsageError
from outrider.common.sampling.processors import process_logits
from outrider.common.types import SamplingParams
from outrider.edge_client.drafting.backend import BackendSettings
from outrider.edge_client.drafting.base import (
    KeepsRunnerUps,
    Prepares,
    ProposesAlong,
    ProposesTrees,
    ReportsRuntime,
)
from outrider.edge_client.drafting.drafter import Drafter
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.edge_client.drafting.node_values import NodeValues
from outrider.edge_client.drafting.pool import RenewableSequence, SequencePool
from outrider.edge_client.drafting.pytorch import network
from outrider.edge_client.drafting.pytorch.check import check_export
from outrider.edge_client.drafting.pytorch.kv import FIRST_CAPACITY, KvBuffer
from outrider.edge_client.drafting.pytorch.model import TorchDraftModel, TorchDraftSequence
from outrider.edge_client.drafting.pytorch.quantised import num_weight_bytes
from outrider.edge_client.drafting.registry import create_draft_model
from outrider.edge_client.drafting.trees import TreeBudget

SAMPLED = SamplingParams(temperature=0.8, seed=11)
PLAIN = SamplingParams(temperature=1.0)
PROMPT = [5, 9, 200, 17, 33, 8, 120]
BUDGET = TreeBudget(num_nodes=24, max_depth=6, max_width=4)
TEXT = [(37 * number + 11) % 300 for number in range(90)]  # longer than a chunk, and than every window
WAYS = {"float32": BackendSettings("torch", "cpu"), "fp8 KV": BackendSettings("torch", "cpu", kv_dtype="fp8")}


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_dir(
        tmp_path_factory.mktemp("draft") / "hf", "qwen2", num_tokens=500, max_position_embeddings=700
    )


@pytest.fixture(scope="module", params=WAYS)
def model(request: pytest.FixtureRequest, hf_dir: Path) -> Iterator[TorchDraftModel]:
    with TorchDraftModel.open(hf_dir, WAYS[request.param]) as model:
        yield model


def start(model: TorchDraftModel, text: list[int], sampling: SamplingParams = SAMPLED) -> TorchDraftSequence:
    sequence = model.sequence(sampling, num_prompt_tokens=len(PROMPT))
    sequence.commit(text)
    return sequence


def logits_after(model: TorchDraftModel, text: list[int]) -> np.ndarray:
    """As a plain reference: fed at once, without a tree."""
    return start(model, text).parts[0].feed(text, 0).logits[0].copy()


# ------------------------------------------------------------------------- what the model says


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt_neox", "gemma2", "gemma3_text"])
def test_probabilities_are_those_of_transformers(arch: str, tmp_path: Path) -> None:
    """In chunks and alone, before and beyond a window, with a soft cap."""
    directory = make_tiny_target(tmp_path, arch, **WINDOWED.get(arch, {}))
    with TorchDraftModel.open(directory, WAYS["float32"]) as model, torch.no_grad():
        reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        wanted = reference(torch.tensor([TEXT])).logits[0, :, : model.num_tokens].softmax(-1).numpy()
        runner, _ = model.sequence(PLAIN).parts
        for first in (5, 64):
            assert np.abs(runner.feed(TEXT[:first], 0).probs[0] - wanted[first - 1]).max() <= 1e-5
            for position in range(first, first + 20):
                found = runner.feed([TEXT[position]], position).probs[0]
                assert np.abs(found - wanted[position]).max() <= 1e-5
        num_past = 70
        assert np.abs(runner.feed(TEXT[num_past:], num_past).probs[0] - wanted[-1]).max() <= 1e-5


def test_rows_are_softmax_and_the_processed_scores_bit_for_bit(model: TorchDraftModel) -> None:
    for temperature in (0.7, 1.0, 1.3):
        params = SamplingParams(temperature=temperature)
        rows = start(model, PROMPT, params).parts[0].feed([4], 0)
        scores = process_logits(np, rows.logits, params, prompt_ids=(), output_ids=())
        assert np.array_equal(rows.tempered_logits, scores)
        for probs in (rows.probs, rows.tempered_probs):
            assert probs.shape == (1, 500) and probs.sum() == pytest.approx(1, abs=1e-5)
        assert rows.probs.argmax() == rows.logits.argmax()


def test_one_forward_is_made_for_each_drafted_token_and_each_level_of_a_tree(
    model: TorchDraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence, forwards = start(model, PROMPT), []
    forward = model.network.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        forwards.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.network.model, "forward", counting)
    assert len(sequence.propose(4).token_ids) == 4
    assert forwards == [len(PROMPT), 1, 1, 1]
    forwards.clear()
    draft = sequence.propose_tree(BUDGET, NodeValues())
    assert len(forwards) == draft.num_runs <= BUDGET.max_depth and max(forwards) > 1


def test_a_sequence_has_all_that_the_edge_asks_of_one(model: TorchDraftModel) -> None:
    assert model.signal_names == ("nll", "entropy", "margin")
    sequence = start(model, PROMPT)
    for protocol in (ProposesTrees, ProposesAlong, KeepsRunnerUps, Prepares, RenewableSequence):
        assert isinstance(sequence, protocol)
    told, one_by_one = start(model, PROMPT).propose_along([3, 4]), start(model, PROMPT)
    for token_id, next_id in zip(told, (3, 4, None), strict=True):
        assert one_by_one.propose(1).token_ids == (token_id,)
        one_by_one.commit(() if next_id is None else [next_id])
    sequence.keep_runner_ups()
    draft = sequence.propose(3)
    assert len(draft.signals) == len(draft.draft_probs) == len(draft.runner_ups) == 3
    supported = model.sequence(SAMPLED, num_support=16)
    supported.commit(PROMPT)
    assert [len(each.token_ids) for each in supported.propose(2).supports] == [16, 16]


# --------------------------------------------------------------------------------------- rollback


def propose_after(model: TorchDraftModel, *commits: list[int]) -> Any:
    """A fresh sequence that is fed each of `commits` in one go before it proposes."""
    sequence = model.sequence(SAMPLED)
    for token_ids in commits[:-1]:
        sequence.commit(token_ids)
        sequence.propose(1)  # feeds what is committed, speculates nothing
    sequence.commit(commits[-1])
    return sequence.propose(6)


def test_a_draft_after_rollback_equals_a_fresh_prefill_bit_for_bit(model: TorchDraftModel) -> None:
    sequence = model.sequence(SAMPLED)
    sequence.commit(PROMPT)
    first = sequence.propose(6)
    correction = (first.token_ids[0] + 1) % model.num_tokens
    sequence.commit([correction])  # all six are rejected
    sequence.check_integrity()
    assert sequence.propose(6) == propose_after(model, PROMPT, [correction])
    sequence.truncate(len(PROMPT))
    sequence.commit([77, 78])
    sequence.check_integrity()
    assert sequence.propose(6) == propose_after(model, PROMPT, [77, 78])


def test_kv_in_use_is_changed_by_nothing_that_comes_after_it(model: TorchDraftModel) -> None:
    sequence = start(model, PROMPT)
    sequence.propose(1)
    kv = sequence.parts[0]._kv

    def written() -> list[torch.Tensor]:
        tensors = [each for parts in kv._layers.values() for part in parts for each in part._tensors]
        return [each[:, : len(PROMPT) - 1].clone() for each in tensors]  # the last is fed again for its row

    before = written()
    for text in ([1], [2, 3], list(range(40))):
        sequence.propose(5)
        sequence.propose_tree(BUDGET, NodeValues())
        sequence.commit(text)
        sequence.propose(1)
        sequence.truncate(len(PROMPT))
    assert before and all(map(torch.equal, before, written()))


def test_a_long_text_is_caught_up_in_chunks_while_the_kv_grows_to_the_context(model: TorchDraftModel) -> None:
    text = [(31 * number) % 500 for number in range(model.max_context - 2)]
    grown, sequence = start(model, text[:100]), start(model, text)
    grown.propose(2)
    assert grown.parts[0].capacity == FIRST_CAPACITY
    grown.commit(text[100:])
    assert len(grown.propose(9).token_ids) == len(sequence.propose(9).token_ids) == 2
    assert grown.parts[0].capacity == model.max_context
    assert np.abs(grown.feed_root().probs - sequence.feed_root().probs).max() < 1e-5
    for each in (grown, sequence):
        each.check_integrity()
        each.commit([5, 6])
        assert each.propose(4).token_ids == ()


# ------------------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_each_node_of_a_random_tree_has_the_logits_of_its_path_as_a_chain(arch: str, tmp_path: Path) -> None:
    """Past the window too, whose tokens are counted along the path."""
    directory = make_tiny_target(tmp_path, arch, **WINDOWED.get(arch, {}))
    rng = random.Random(5)
    with TorchDraftModel.open(directory, WAYS["float32"]) as model:
        for text in (PROMPT, TEXT):
            sequence = start(model, text)
            sequence.feed_root()
            level: list[tuple[int, ...]] = [()]
            for _ in range(3):
                children = {(*rng.choice(level), rng.randrange(300)) for _ in range(rng.randrange(2, 6))}
                level = sorted(children)
                found = [rows.logits[0].copy() for rows, _ in sequence.feed_paths(level)]
                for path, logits in zip(level, found, strict=True):
                    assert np.abs(logits - logits_after(model, [*text, *path])).max() < 1e-4
            sequence.check_integrity()


@pytest.mark.parametrize("arch", ["qwen2", "gemma2"])
def test_the_kv_of_any_committed_path_is_kept(arch: str, tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path, arch, **WINDOWED.get(arch, {}))
    rng = random.Random(1)
    with TorchDraftModel.open(directory, WAYS["float32"]) as model:
        sequence, text = start(model, TEXT[:30]), TEXT[:30]
        for round_ in range(6):
            draft = sequence.propose_tree(BUDGET, NodeValues())
            nodes = [rng.randrange(len(draft.token_ids))]
            while draft.parents[nodes[-1]] >= 0:
                nodes.append(draft.parents[nodes[-1]])
            path = [draft.token_ids[node] for node in reversed(nodes)]
            cut = rng.randrange(len(path) + 1) if round_ % 2 else len(path)
            for part in (path[:cut], path[cut:], [rng.randrange(300)]):
                sequence.commit(part)
                text += part
                sequence.check_integrity()
            found = sequence.feed_root().logits[0]
            assert np.abs(found - logits_after(model, text)).max() < 1e-4


def test_trees_pass_the_drafter_and_the_pool(model: TorchDraftModel) -> None:
    drafter = Drafter(SequencePool(model, 1 << 30).lease(), SAMPLED, len(PROMPT))
    assert drafter.can_propose_trees
    drafter.warm_up(PROMPT)
    draft, _ = drafter.propose_tree(PROMPT, BUDGET, NodeValues(), assumed=(7, 8))
    fresh = start(model, PROMPT)
    fresh.propose(1)
    fresh.commit([7, 8])
    assert draft.token_ids == fresh.propose_tree(BUDGET, NodeValues()).token_ids


# -------------------------------------------------------------------------- weights and KV in few bits


def test_quantised_weights_run_on_a_cpu_are_near_their_source_and_small(hf_dir: Path) -> None:
    probs, num_bytes, fingerprints = {}, {}, set()
    for weights in ("float32", "bfloat16", "fp8", "nf4"):
        with TorchDraftModel.open(hf_dir, BackendSettings("torch", "cpu", weights)) as model:
            sequence = start(model, PROMPT)
            probs[weights] = np.stack(
                [sequence.parts[0].feed([each], at).probs[0].copy() for at, each in enumerate(TEXT[:40])]
            )
            layers = model.network.model.model.layers
            num_bytes[weights] = num_weight_bytes(layers)
            assert sequence.propose(4) == start(model, PROMPT).propose(4)
            assert f"{weights} weights" in model.runtime and "on cpu" in model.runtime
            assert isinstance(model, ReportsRuntime)
            fingerprints.add(model.fingerprint)
    distance = {name: np.abs(each - probs["float32"]).sum(-1).mean() / 2 for name, each in probs.items()}
    assert 0 < distance["bfloat16"] < distance["fp8"] < distance["nf4"] < 0.35
    assert distance["fp8"] < 0.12
    share = {name: each / num_bytes["float32"] for name, each in num_bytes.items()}
    assert share["bfloat16"] == 0.5
    assert share["fp8"] < 0.29 and share["nf4"] < 0.21  # small matrices: scales, biases and norms weigh more
    assert len(fingerprints) == 4


def test_nf4_weights_give_a_token_the_same_numbers_alone_and_with_others(hf_dir: Path) -> None:
    """bitsandbytes multiplies a single row by another kernel, in bfloat16, on some CPUs."""
    with TorchDraftModel.open(hf_dir, BackendSettings("torch", "cpu", "nf4")) as model:
        runner, _ = start(model, PROMPT).parts
        together = runner.feed(TEXT[:12], 0).logits.copy()
        for position, token_id in enumerate(TEXT[:12]):
            alone = runner.feed([token_id], position).logits
        assert np.abs(alone - together).max() < 1e-4


def test_fp8_kv_takes_half_of_bfloat16s_bytes_with_a_scale_a_slot_and_head() -> None:
    key = torch.randn(2, 3, 64).to(torch.bfloat16)
    sizes = {}
    for is_fp8 in (False, True):
        kv = KvBuffer(600, is_fp8)
        kv.reserve(10)
        kv.append(0, key, key, 0)
        sizes[is_fp8] = kv.num_bytes
    assert sizes[False] == 2 * 2 * 512 * 64 * 2
    assert sizes[True] == 2 * 2 * 512 * (64 + 2)  # a float16 scale
    assert sizes[True] / sizes[False] <= 0.52


def test_moved_and_grown_fp8_kv_keeps_its_codes_and_scales() -> None:
    kv = KvBuffer(2000, True)
    kv.reserve(12)
    keys, values = kv.append(3, torch.randn(2, 12, 8), torch.randn(2, 12, 8), 0)
    kv.move([7, 9, 11], 5)
    kv.reserve(1500)
    kv.check_integrity()
    assert kv.capacity == 2000
    last = torch.zeros(2, 1, 8)
    for found, before in zip(kv.append(3, last, last, 8), (keys, values), strict=True):
        assert torch.equal(found[:, :8], before[:, [0, 1, 2, 3, 4, 7, 9, 11]])


# ---------------------------------------------------------------------------- directories and flags


def check_refused(directory: Path, message: str, settings: BackendSettings | None = None) -> None:
    with pytest.raises((ModelError, UsageError), match=message) as caught:
        create_draft_model("model", directory, backend=settings or WAYS["float32"])
    assert "\n" not in str(caught.value)


def _drop_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _spoil(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


DAMAGES: dict[str, tuple[Any, str]] = {
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "has no safetensors"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "no configuration": (lambda path: (path / "config.json").unlink(), "has no config.json"),
    "not JSON": (lambda path: (path / "config.json").write_text("{"), "cannot be read"),
    "unknown model type": (
        lambda path: edit_json(path / "config.json", model_type="llamoid", auto_map={"x": "y"}),
        "'llamoid' is unknown to the installed transformers .it brings its own code, which is never run",
    ),
    "no attention": (
        lambda path: (path / "config.json").write_text('{"model_type": "mamba"}'),
        "'mamba' is not a decoder that takes its attention from outside",
    ),
    "attention in chunks": (
        lambda path: edit_json(path / "config.json", layer_types=["full_attention", "chunked_attention"]),
        "has layers of chunked_attention, which the torch draft does not compute",
    ),
    "quantised by others": (
        lambda path: edit_json(path / "config.json", quantization_config={"quant_method": "gptq"}),
        r"is already quantised \(gptq\); --draft-weights quantises the original weights",
    ),
    "a tensor is missing": (_drop_tensor, "has no tensor 'model.layers.1.mlp.up_proj.weight'"),
    "truncated weights": (
        lambda path: (path / "model.safetensors").write_bytes(b"\0" * 64),
        "cannot be loaded: ",
    ),
    "sizes that do not fit": (
        lambda path: edit_json(path / "config.json", intermediate_size=64),
        "cannot be loaded: ",
    ),
    "a weight is not a number": (_spoil, "its logits are not finite: the weights are damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_directory_that_cannot_draft_is_refused_in_one_line(
    damage: str, hf_dir: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(hf_dir, tmp_path / "damaged"))
    harm, message = DAMAGES[damage]
    harm(directory)
    check_refused(directory, message)


@pytest.mark.parametrize(
    ("arch", "fields", "name"),
    [("doge", {}, "attention_mask"), ("bert", {"num_key_value_heads": 4, "is_decoder": False}, "is_causal")],
)
def test_attention_that_is_not_over_all_tokens_before_is_refused_by_name(
    arch: str, fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """The masks of an untrained Doge change no probability yet."""
    directory = make_tiny_target(tmp_path / "model", arch, **fields)
    check_refused(directory, f"attention has '{name}' .*which the torch draft does not compute")


def test_each_backend_says_what_it_got_when_it_is_given_the_others_directory(
    hf_dir: Path, tmp_path: Path
) -> None:
    export_draft(hf_dir, tmp_path / "onnx")
    says = "is an exported ONNX draft: --draft-backend torch reads the Hugging Face directory"
    check_refused(tmp_path / "onnx", says)
    says = "no draft.json; run `edge-client draft export` on it, or draft with --draft-backend torch"
    check_refused(hf_dir, says, BackendSettings())
    check_refused(tmp_path / "none", "is not a directory")


def test_settings_that_a_backend_lacks_are_refused_by_name(hf_dir: Path) -> None:
    for settings, message in (
        (BackendSettings(weights="nf4"), "--draft-weights nf4 goes with --draft-backend torch"),
        (BackendSettings(device="cuda"), "--draft-device cuda goes with --draft-backend torch"),
        (BackendSettings(kv_dtype="fp8"), "--draft-kv-dtype fp8 goes with --draft-backend torch"),
        (BackendSettings("tensorrt"), "unknown draft backend 'tensorrt'; known: onnx, torch"),
        (BackendSettings("torch", "abacus"), "--draft-device abacus cannot be used"),
        (BackendSettings("torch", "meta", "nf4"), "--draft-device meta cannot be used"),
    ):
        check_refused(hf_dir, message, settings)
    torch_ = WAYS["float32"]
    with pytest.raises(UsageError, match="--gate-variance needs an exported draft's variant"):
        create_draft_model("model", hf_dir, has_variance=True, backend=torch_)
    with pytest.raises(UsageError, match="--draft-backend torch goes with --draft-strategy model"):
        create_draft_model("prompt-lookup", hf_dir, backend=torch_)


@pytest.mark.parametrize("backend", ["torch", "onnx"])
def test_a_draft_may_lack_special_tokens_of_its_tokenizer_and_no_others(
    backend: str, hf_dir: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(hf_dir, tmp_path / "model")
    draft, num_rows = directory, json.loads((directory / "config.json").read_text())["vocab_size"]
    add_token(directory / "tokenizer.json", num_rows)
    if backend == "onnx":
        export_draft(directory, draft := tmp_path / "draft")
    model = create_draft_model("model", draft, backend=BackendSettings(backend))
    assert model.num_tokens == num_rows
    sequence = model.sequence(SAMPLED)
    with pytest.raises(InvalidFieldError, match=f"{num_rows}"):
        sequence.commit([1, num_rows])
        sequence.propose(1)
    sequence.close()
    model.close()
    add_token(directory / "tokenizer.json", num_rows + 1, is_special=False)
    message = f"has {num_rows + 2} tokens, but the embedding only {num_rows} rows"
    with pytest.raises(ModelError, match=message):
        if backend == "onnx":
            export_draft(directory, tmp_path / "other")
        else:
            create_draft_model("model", directory, backend=BackendSettings(backend))


def test_a_device_without_fp8_numbers_says_so(hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_has_fp8", lambda device: False)
    check_refused(
        hf_dir,
        "--draft-weights fp8 does not go with --draft-device cpu",
        BackendSettings("torch", "cpu", "fp8"),
    )
    check_refused(hf_dir, "--draft-kv-dtype fp8 does not go with --draft-device cpu", WAYS["fp8 KV"])


def test_layers_that_cannot_be_quantised_are_not_left_as_they_are_silently(tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path, "gpt2")  # its matrices are no linear layers of torch
    check_refused(
        directory, "no linear layers that --draft-weights fp8 could", BackendSettings("torch", "cpu", "fp8")
    )


def test_an_architecture_that_attends_otherwise_is_refused(
    hf_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.edge_client.drafting.pytorch import attention

    softmax = attention._softmax_attention

    def other(*args: Any) -> torch.Tensor:
        return 1.2 * softmax(*args)

    monkeypatch.setattr(attention, "_softmax_attention", other)
    check_refused(hf_dir, "keeps or attends to more than the torch draft computes")


# --------------------------------------------------------------------------------- the export's check


@pytest.mark.parametrize("first_layers", [None, 1])
def test_an_export_computes_what_its_source_says_with_the_same_weights(
    first_layers: int | None, hf_dir: Path, tmp_path: Path
) -> None:
    export_draft(hf_dir, tmp_path, first_layers=first_layers)
    check = check_export(hf_dir, tmp_path, first_layers)
    assert check.num_tokens == 128
    assert check.from_same_weights.mean < 0.05 < check.from_source.mean


def test_an_export_of_other_weights_fails_the_check(hf_dir: Path, tmp_path: Path) -> None:
    export_draft(make_hf_dir(tmp_path / "other", "llama", num_tokens=500), tmp_path / "onnx")
    with pytest.raises(ModelError, match="does not compute what its weights say"):
        check_export(hf_dir, tmp_path / "onnx")


def test_what_a_directory_says_of_itself_is_read(hf_dir: Path) -> None:
    with TorchDraftModel.open(hf_dir, WAYS["float32"]) as model:
        assert (model.num_tokens, model.max_context, model.eos_token_ids) == (500, 700, (3,))
        assert json.loads((hf_dir / "config.json").read_text())["model_type"] == "qwen2"
