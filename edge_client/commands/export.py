"""Runs `edge-client draft export HF_DIR OUT_DIR` and `draft add-dropout DRAFT_DIR`."""

from __future__ import annotations

import argparse
import importlib
import time
from pathlib import Path
from types import ModuleType

from outrider.common.errors import UsageError
from outrider.common.process.extras import needs_extra
from outrider.common.process.progress import show_progress


def main(namespace: argparse.Namespace) -> int:
    """Returns the exit status. Raises `OutriderError`."""
    numbers = _dropout_numbers(namespace)
    if namespace.draft_verb == "add-dropout":
        return _add_dropout(namespace.draft_dir, *numbers)
    check = _import_check() if namespace.check else None
    _export(namespace.hf_dir, namespace.out_dir, namespace.max_context, namespace.first_layers)
    if check is not None:
        _check(check, namespace.hf_dir, namespace.out_dir, namespace.first_layers)
    return _add_dropout(namespace.out_dir, *numbers) if namespace.mc_dropout else 0


def _import_check() -> ModuleType:
    with needs_extra("edge-torch", "draft export --check"):
        return importlib.import_module("outrider.edge_client.drafting.pytorch.check")


def _check(module: ModuleType, hf_dir: Path, out_dir: Path, first_layers: int | None) -> None:
    found = module.check_export(hf_dir, out_dir, first_layers)
    print(
        f"check of {found.num_tokens} tokens, total variation of probabilities\n"
        f"  from the source                    {found.from_source}\n"
        f"  from the source with INT4 weights  {found.from_same_weights}"
    )


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


def _export(hf_dir: Path, out_dir: Path, max_context: int | None, first_layers: int | None) -> None:
    from outrider.edge_client.drafting.export.exporter import export_draft

    start_s = time.monotonic()

    def show(done: int, total: int, what: str) -> None:
        show_progress(f"{done}/{total} {what}")

    try:
        report = export_draft(
            hf_dir, out_dir, max_context=max_context, first_layers=first_layers, progress=show
        )
    finally:
        show_progress("")
    took_s = time.monotonic() - start_s
    part = (
        f" (first {report.num_layers} of {report.num_source_layers} layers)"
        if report.num_source_layers
        else ""
    )
    print(
        f"{report.out_dir}: {report.architecture}{part}, {report.num_parameters / 1e6:.1f} M parameters, "
        f"{report.num_bytes / 1e6:.1f} MB, context {report.max_context}, in {took_s:.1f} s\n"
        f"draft fingerprint      {report.fingerprint}\n"
        f"tokenizer fingerprint  {report.tokenizer_fingerprint}"
    )
