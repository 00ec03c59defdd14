"""`draft export --precision auto` and `--self-check`: what is measured, chosen and said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.matrices import one_of

from benchmarks.sources.shapes import NUM_TOKENS, make_dir, source_probs
from outrider.common.errors import UsageError
from outrider.edge_client.commands.cli import main
from outrider.edge_client.commands.parser import make_parser
from outrider.edge_client.drafting.export import agreement
from outrider.edge_client.drafting.export.agreement import choose_precision, mean_overlap, read_passages
from outrider.edge_client.drafting.export.exporter import export_draft, read_source
from outrider.edge_client.drafting.export.precision import FLOAT32, PRECISIONS
from outrider.edge_client.drafting.export.quantize import fake_quantize
from outrider.edge_client.drafting.pytorch.check import check_export
from outrider.edge_client.tokenization.chat_template import load_chat_template

PASSAGES = np.random.default_rng(2).integers(0, NUM_TOKENS, (3, 40)).tolist()


def round_directory(hf_dir: Path) -> None:
    """Gives a model the weights that INT4 would, as training for it does."""
    path = hf_dir / "model.safetensors"
    tensors = {
        name: fake_quantize(each) if each.ndim == 2 else each for name, each in load_file(path).items()
    }
    save_file(tensors, path)


def test_the_float_graph_reads_passages_as_transformers_does(tmp_path: Path) -> None:
    source = read_source(make_dir(tmp_path / "hf", "gpt_neox"))
    rows = np.concatenate(list(read_passages(source, source.build(FLOAT32), PASSAGES)))
    logits = [np.log(source_probs(source.hf_dir, passage)) / agreement.TEMPERATURE for passage in PASSAGES]
    wanted = np.exp(np.concatenate(logits))
    np.testing.assert_allclose(rows, wanted / wanted.sum(-1, keepdims=True), atol=1e-5)


def test_overlap_is_what_sampling_accepts() -> None:
    ours, theirs = (
        np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]),
        np.array([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]]),
    )
    assert mean_overlap(iter([ours[:1], ours[1:]]), [theirs[:1], theirs[1:]]) == pytest.approx(0.75)


def test_auto_takes_the_smallest_precision_that_loses_little(tmp_path: Path) -> None:
    hf_dir = make_dir(tmp_path / "hf", "llama")
    graph, choice = choose_precision(read_source(hf_dir), PASSAGES)
    assert list(choice.acceptance) == list(PRECISIONS[: len(choice.acceptance)])
    *too_low, enough = choice.acceptance.values()
    assert max(too_low) < 1 - agreement.MAX_LOSS and choice.acceptance["int4"] < enough
    assert graph.precision == choice.precision == list(choice.acceptance)[-1] != "int4"
    assert choice.num_tokens == 120


def test_a_model_trained_for_int4_stays_int4(tmp_path: Path) -> None:
    hf_dir = make_dir(tmp_path / "hf", "llama")
    round_directory(hf_dir)
    graph, choice = choose_precision(read_source(hf_dir), PASSAGES)
    assert graph.precision == "int4" and list(choice.acceptance) == ["int4"]


def test_a_large_model_stays_int4_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_MEASURED_PARAMETERS", 1000)
    graph, choice = choose_precision(read_source(make_dir(tmp_path / "hf", "llama")), PASSAGES)
    assert (graph.precision, choice.acceptance) == ("int4", {})


def test_the_command_says_what_it_chose_and_by_which_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_dir, text = make_dir(tmp_path / "hf", "llama"), tmp_path / "mine.txt"
    text.write_text(" ".join(f"w{number % 300}" for number in range(200)))
    assert main(["draft", "export", str(hf_dir), str(tmp_path / "out"), "--text", str(text)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    precision = json.loads((tmp_path / "out" / "draft.json").read_text())["precision"]
    assert f" M parameters, {precision}, " in first
    assert second.startswith(
        f"precision {precision}: acceptance against the float model (mean of sum min(p, q), "
    )
    assert "tokens of mine.txt): int4 0." in second and second.endswith("wanted 0.98")


def test_text_without_auto_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--precision", "int8", "--text", "mine.txt"]
    assert main(["draft", "export", str(tmp_path), str(tmp_path / "out"), *flags]) == UsageError.exit_code
    assert "--text goes with --precision auto" in capsys.readouterr().err
    flags = ["--mc-dropout", "--text", "mine.txt"]
    assert main(["draft", "export", str(tmp_path), str(tmp_path / "out"), *flags]) == UsageError.exit_code
    assert "--text compares precisions, and --mc-dropout needs int4" in capsys.readouterr().err


def test_an_export_leaves_no_chat_template_of_another_draft(tmp_path: Path) -> None:
    chatting, plain, out = (
        make_dir(tmp_path / "a", "llama"),
        make_dir(tmp_path / "b", "llama"),
        tmp_path / "o",
    )
    (chatting / "chat_template.jinja").write_text("of a")
    (plain / "tokenizer_config.json").write_text('{"chat_template": "of b"}')
    export_draft(chatting, out)
    template = load_chat_template(out)
    assert template is not None and template.source == "of a"
    export_draft(plain, out)
    template = load_chat_template(out)
    assert template is not None and template.source == "of b"


def test_dropout_takes_int4_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "draft",
        "export",
        str(make_dir(tmp_path / "hf", "llama")),
        str(tmp_path / "out"),
        "--mc-dropout",
    ]
    assert main(command) == 0
    assert "precision int4: --mc-dropout needs it" in capsys.readouterr().out
    assert main([*command, "--precision", "int8"]) == UsageError.exit_code
    assert "--mc-dropout needs --precision int4, not int8" in capsys.readouterr().err


def test_auto_is_the_default() -> None:
    assert make_parser().parse_args(["draft", "export", "a", "b"]).precision == "auto"


@pytest.mark.parametrize(
    ("precision", "kind"), one_of(2, PRECISIONS, ["gpt2", "gpt_neox", "gemma3, window of 8", "phi"])
)
def test_the_self_check_knows_every_shape_and_precision(kind: str, precision: str, tmp_path: Path) -> None:
    hf_dir = make_dir(tmp_path / "hf", kind)
    export_draft(hf_dir, tmp_path / "out", precision=precision)
    found = check_export(hf_dir, tmp_path / "out")
    assert found.acceptance == 1 - found.from_source.mean
    assert found.from_same_weights is not None and found.from_same_weights.mean < 0.05
    assert found.export_ms > 0 < found.source_ms


def test_filled_up_heads_are_compared_with_the_source_alone(tmp_path: Path) -> None:
    hf_dir = make_dir(tmp_path / "hf", "llama, odd sizes")
    export_draft(hf_dir, tmp_path / "out", precision="int8")
    found = check_export(hf_dir, tmp_path / "out")
    assert found.from_same_weights is None and found.acceptance > 0.95
