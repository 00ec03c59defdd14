"""Runs `edge-client draft export HF_DIR OUT_DIR`, `draft add-dropout DRAFT_DIR` and `draft compare DRAFT …`."""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.progress import show_progress

if TYPE_CHECKING:
    from outrider.edge_client.drafting.export.exporter import BuiltGraph, Source

AUTO, INT4 = "auto", "int4"


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status. Raises `OutriderError`."""
    if namespace.draft_verb == "compare":
        from outrider.edge_client.commands.compare import main as compare

        return compare(namespace)
    numbers = _dropout_numbers(namespace)
    if namespace.draft_verb == "add-dropout":
        return _add_dropout(namespace.draft_dir, *numbers)
    check = _import_check() if namespace.self_check else None
    _export(namespace)
    if check is not None:
        _check(check, namespace.hf_dir, namespace.out_dir, namespace.first_layers)
    return _add_dropout(namespace.out_dir, *numbers) if namespace.mc_dropout else 0


def _import_check() -> ModuleType:
    with needs_extra("edge-torch", "draft export --self-check"):
        return importlib.import_module("outrider.edge_client.drafting.pytorch.check")


def _check(module: ModuleType, hf_dir: Path, out_dir: Path, first_layers: int | None) -> None:
    found = module.check_export(hf_dir, out_dir, first_layers)
    lines = [
        f"self-check on {found.num_tokens} tokens that the source wrote at temperature 1",
        f"  acceptance against the source      {found.acceptance:.4f} (mean of sum min(p, q))",
        f"  total variation from the source    {found.from_source}",
    ]
    if found.from_same_weights is not None:
        lines.append(f"  with its weights in {found.precision:<15}{found.from_same_weights}")
    ratio = found.source_ms / found.export_ms
    lines.append(
        f"  a token alone                      {found.export_ms:.2f} ms, the source in torch {found.source_ms:.2f} ms "
        f"({ratio:.1f} times)"
    )
    print("\n".join(lines))


def _dropout_numbers(namespace: argparse.Namespace) -> tuple[int, float]:
    from outrider.edge_client.drafting.export.dropout_graph import check_numbers
    from outrider.edge_client.drafting.rows.dropout import DEFAULT_RATE, DEFAULT_SAMPLES

    given = {"samples": namespace.mc_dropout_samples, "rate": namespace.mc_dropout_rate}
    if namespace.draft_verb == "export" and not namespace.mc_dropout:
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"--mc-dropout-{name} says nothing without --mc-dropout")
    samples = DEFAULT_SAMPLES if given["samples"] is None else given["samples"]
    rate = DEFAULT_RATE if given["rate"] is None else given["rate"]
    check_numbers(samples, rate)
    return samples, rate


def _add_dropout(draft_dir: Path, num_samples: int, rate: float) -> int:
    from outrider.edge_client.drafting.export.dropout_graph import add_dropout

    path = add_dropout(draft_dir, num_samples=num_samples, rate=rate)
    print(f"{path}: {num_samples} masks a token at rate {rate:g}, {path.stat().st_size / 1e6:.1f} MB")
    return 0


def _export(namespace: argparse.Namespace) -> None:
    from outrider.edge_client.drafting.export.exporter import read_source, write_draft

    if namespace.text and namespace.precision != AUTO:
        raise UsageError(
            f"--text goes with --precision auto, which compares on it; not with {namespace.precision}"
        )
    if namespace.text and namespace.mc_dropout:
        raise UsageError("--text compares precisions, and --mc-dropout needs int4: leave one of them out")
    if namespace.mc_dropout and namespace.precision not in (AUTO, INT4):
        raise UsageError(f"--mc-dropout needs --precision int4, not {namespace.precision}")
    start_s = time.monotonic()
    source = read_source(
        namespace.hf_dir, max_context=namespace.max_context, first_layers=namespace.first_layers
    )
    lines = []
    try:
        if namespace.precision == AUTO and not namespace.mc_dropout:
            graph, line = _choose(source, namespace.text)
            lines.append(line)
        else:
            graph = source.build(
                INT4 if namespace.mc_dropout else namespace.precision,
                progress=lambda done, total, what: show_progress(f"{done}/{total} {what}"),
            )
        report = write_draft(source, graph, namespace.out_dir)
    finally:
        show_progress("")
    took_s = time.monotonic() - start_s
    part = (
        f" (first {report.num_layers} of {report.num_source_layers} layers)"
        if report.num_source_layers
        else ""
    )
    if namespace.precision == AUTO and namespace.mc_dropout:
        lines.append("precision int4: --mc-dropout needs it")
    if report.fallbacks:
        kept = (f"{name} ({precision})" for name, precision in report.fallbacks.items())
        lines.append(f"kept in another precision: {', '.join(kept)}")
    lines += [
        f"draft fingerprint      {report.fingerprint}",
        f"tokenizer fingerprint  {report.tokenizer_fingerprint}",
    ]
    print(
        f"{report.out_dir}: {report.architecture}{part}, {report.num_parameters / 1e6:.1f} M parameters, "
        f"{report.precision}, {report.num_bytes / 1e6:.1f} MB, context {report.max_context}, in {took_s:.1f} s"
    )
    print("\n".join(lines))


def _choose(source: Source, files: Sequence[Path]) -> tuple[BuiltGraph, str]:
    """Returns the graph in the precision that `auto` chooses, and why, as a sentence."""
    from outrider.edge_client.calibration.passages import cut_passages, read_texts
    from outrider.edge_client.drafting.export import agreement
    from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer

    tokenizer = EdgeTokenizer(source.hf_dir / "tokenizer.json")
    text = read_texts(files or [_embedded_text()])
    cut = cut_passages(
        text.documents,
        tokenizer.encode,
        num_passages=agreement.NUM_PASSAGES,
        num_prompt_tokens=min(agreement.PASSAGE_TOKENS, source.context),
        num_following_tokens=0,
        needs_following=False,
    )
    passages = [each.prompt_ids for each in cut]
    graph, choice = agreement.choose_precision(source, passages, show_progress)
    if not choice.acceptance:
        limit = agreement.MAX_MEASURED_PARAMETERS / 1e6
        found = f"{graph.num_parameters / 1e6:.0f} M parameters"
        return graph, f"precision int4: {found}, above {limit:.0f} M nothing is compared with the float model"
    found = ", ".join(f"{name} {share:.3f}" for name, share in choice.acceptance.items())
    return graph, (
        f"precision {choice.precision}: acceptance against the float model (mean of sum min(p, q), temperature "
        f"{agreement.TEMPERATURE:g}, {choice.num_tokens} tokens of {', '.join(text.names)}): {found}; wanted "
        f"{1 - agreement.MAX_LOSS:g}"
    )


def _embedded_text() -> Path:
    from outrider.edge_client.config.run_config import default_draft_dir

    path = default_draft_dir().parent / "prompts.jsonl"
    if not path.is_file():
        raise UsageError("--precision auto needs --text FILE here: the embedded prompts are not installed")
    return path
