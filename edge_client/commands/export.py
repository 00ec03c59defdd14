"""`edge-client draft export HF_DIR OUT_DIR`."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def export(hf_dir: Path, out_dir: Path, max_context: int | None, first_layers: int | None) -> int:
    from edge_client.drafting.export import export_draft

    start_s = time.monotonic()
    is_live = sys.stderr.isatty()

    def show(done: int, total: int, what: str) -> None:
        if is_live:
            print(f"\r\x1b[K{done}/{total} {what}", end="", file=sys.stderr, flush=True)

    report = export_draft(hf_dir, out_dir, max_context=max_context, first_layers=first_layers, progress=show)
    if is_live:
        print("\r\x1b[K", end="", file=sys.stderr)
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
    return 0
