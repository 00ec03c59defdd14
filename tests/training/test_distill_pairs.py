"""Distilling for any local pair: a new or a saved draft, from text files to an INT4 graph that speculates."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.common.models.fingerprint import tokenizer_fingerprint
from outrider.training.common.options import run_options
from outrider.training.distill import load_stream, main, make_config, parse_args
from outrider.training.draft.distiller import DistillConfig, Distiller
from outrider.training.draft.drafts import draft_shape, parse_size

TEXT = "def function_1(self, value_7): return value_3 + 1\n" * 40
QUICK = "--tokens 2048 --length 32 --batch-tokens 256 --target-text-tokens 2000 --sample-rows 8 --threads 1"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two targets of unlike families and vocabularies padded unlike, a saved draft, and a text."""
    from support.models import make_tiny_target

    root = tmp_path_factory.mktemp("pairs")
    (root / "text.txt").write_text(TEXT * 20)
    (root / "text.jsonl").write_text('{"text": "def f(): pass"}\n{"prompt": "class A:"}\n')
    return {
        "text": root / "text.txt",
        "lines": root / "text.jsonl",
        "qwen2": make_tiny_target(root / "qwen2", "qwen2", vocab=448, hidden=64, num_layers=2),
        "llama": make_tiny_target(
            root / "llama", "llama", vocab=448, hidden=64, num_layers=2, tie_word_embeddings=False
        ),
        "padded": _pad(make_tiny_target(root / "padded", "qwen2", vocab=448, hidden=64, num_layers=1), 512),
        "other": make_tiny_target(root / "other", "llama", vocab=300, hidden=32, num_layers=1),
    }


def _pad(directory: Path, num_rows: int) -> Path:
    """The same model with embedding rows that no token has."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(directory))
    model.resize_token_embeddings(num_rows)
    model.save_pretrained(str(directory))
    return directory


def run_command(monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["distill", *arguments.split(), *QUICK.split()])
    main()


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("qwen2", "--draft-size 64x1 --divergence fkl --draft-share 0.3"),
        ("llama", "--draft-size 32x1 --divergence js --target-share 0"),
        ("qwen2", "--draft {padded} --divergence tvd --target-share 0.5"),
    ],
)
def test_a_distilled_draft_is_exported_and_speculates(
    places: dict[str, Path], target: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.edge_client.drafting.export.exporter import export_draft
    from outrider.training.common.metrics import acceptance
    from outrider.training.judge.evaluate import OnnxDraft

    hf, int4 = tmp_path / "hf", tmp_path / "int4"
    given = f"--target {places[target]} --text {places['text']} --out {hf} "
    run_command(monkeypatch, given + options.format(**places))
    report = export_draft(hf, int4)
    assert report.tokenizer_fingerprint == tokenizer_fingerprint(places[target] / "tokenizer.json")
    text = torch.arange(1, 40)[None]
    with torch.no_grad():
        logits = _load(places[target])(input_ids=text).logits[0, :, : report_tokens(int4)].numpy()
    drafted = OnnxDraft(int4).logits(text[0].numpy())
    assert drafted.shape == logits.shape
    found = acceptance([drafted.argmax(-1) == logits.argmax(-1)], 4)
    assert found.tokens_per_round >= 1


def report_tokens(directory: Path) -> int:
    from outrider.common.models.fingerprint import num_tokens

    return num_tokens(directory / "tokenizer.json")


def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)


def test_easy_tokens_are_those_where_the_draft_lags_most_behind_its_reference(
    places: dict[str, Path], tmp_path: Path
) -> None:
    args = parse_args(
        f"--target {places['qwen2']} --text {places['text']} --out {tmp_path} --draft-size 32x1 "
        f"--easy-share 0.25 --reference {places['padded']} --target-share 0 {QUICK}".split()
    )
    config = make_config(args)
    distiller = Distiller(config, args.target, load_stream(args), tmp_path, reference_dir=args.reference)
    inputs = torch.arange(1, 17)[None]
    compute, num_ids = distiller.compute, distiller.num_ids
    with torch.no_grad():
        hidden = {
            name: compute.last_hidden(model, inputs)
            for name, model in (("d", distiller.model), ("r", distiller.reference), ("t", distiller.target))
        }
    heads = {
        name: model.get_output_embeddings().weight[:num_ids]
        for name, model in (("d", distiller.model), ("r", distiller.reference), ("t", distiller.target))
    }
    logs = {name: torch.log_softmax(hidden[name] @ heads[name].T, -1) for name in hidden}
    kl = {name: (logs["t"].exp() * (logs["t"] - logs[name])).sum(-1) for name in ("d", "r")}
    expected = set((kl["d"] - kl["r"]).topk(4).indices.tolist())
    found = distiller._easiest(inputs, hidden["d"], heads["d"], hidden["t"], heads["t"])
    assert set(found.tolist()) == expected
    assert distiller.train() is not None


def test_a_resumed_distillation_keeps_the_targets_text_and_goes_on(
    places: dict[str, Path], tmp_path: Path
) -> None:
    args = parse_args(
        f"--target {places['qwen2']} --text {places['text']} --out {tmp_path} --draft-size 32x1 "
        f"--slice-minutes 1e-6 {QUICK}".split()
    )
    steps = []
    for _ in range(20):
        distiller = Distiller(make_config(args), args.target, load_stream(args), tmp_path)
        distiller.resume()
        figures = distiller.train()
        steps.append(distiller.state.step)
        if figures is not None:
            break
    assert figures is not None
    assert figures["tokens"] == 2048
    assert figures["sampled_tokens"] >= 2000
    assert steps == list(range(9))  # the first slice was spent on the target's text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--draft {other}", "another tokenizer"),
        ("--draft-size 100x2", "--draft-size 100x2: the hidden size must be a multiple of 32"),
        ("--draft-size big", "give hidden size x layers"),
        ("--target-share 0.8 --draft-share 0.3", "together at most 1"),
        ("--easy-share 0.5", "--easy-share below 1 and --reference belong together"),
        ("--easy-share 0", "--easy-share 0.0"),
        ("--minutes 0", "--minutes must be above 0"),
        ("--device cuda --workers 2", "--workers is for CPUs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    places: dict[str, Path],
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = f"distill --target {places['qwen2']} --text {places['text']} --out {tmp_path} "
    monkeypatch.setattr(sys, "argv", (given + options.format(**places)).split())
    with pytest.raises(SystemExit, match=message):
        main()


def test_text_is_read_from_files_directories_and_lines_and_a_bad_line_is_named(
    places: dict[str, Path], tmp_path: Path
) -> None:
    from outrider.training.data.texts import encode_texts, read_texts

    assert list(read_texts([places["lines"]])) == ["def f(): pass", "class A:"]
    assert TEXT * 20 in list(read_texts([places["text"].parent]))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"other": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
        list(read_texts([tmp_path / "bad.jsonl"]))
    with pytest.raises(ValueError, match="no such file"):
        list(read_texts([tmp_path / "nothing"]))
    stream = encode_texts(iter(["ab", "c"]), places["qwen2"] / "tokenizer.json", 0, 70_000)
    assert (stream == 0).nonzero()[0].tolist() == [0, len(stream) - 2]
    assert stream.dtype == "uint32"


def test_shapes_of_new_drafts_are_whole_int4_blocks() -> None:
    assert parse_size("192x2") == (192, 2)
    shape = draft_shape("192x2", 8192, 4096)
    assert shape == DistillConfig().model  # the embedded draft
    for size in ("64x1", "96x2", "256x3", "512x4", "896x6"):
        shape = draft_shape(size, 8192, 4096)
        assert shape.ffn_size % 32 == shape.hidden_size % 32 == 0
        assert shape.num_heads * shape.head_dim == shape.hidden_size
        assert shape.num_heads % shape.num_kv_heads == 0


def test_minutes_take_the_place_of_a_presets_tokens(places: dict[str, Path], tmp_path: Path) -> None:
    given = f"--target {places['qwen2']} --text {places['text']} --out {tmp_path} "
    assert run_options(parse_args((given + "--minutes 3").split()))["tokens"] is None
    assert run_options(parse_args((given + "--tokens 1e6").split()))["tokens"] == 1_000_000
    assert "tokens" not in run_options(parse_args(given.split()))
