"""Compare choices of the target's recipe on short runs from scratch: optimiser, curricula, schedule.

    python -m outrider.training.judge.compare_targets --minutes 5 --threads 1 [--only base "AdamW, 0.003" ...]

Every variant has the same time, not the same tokens: on two cores a choice is worth what it brings by the
hour. Interrupted, the same command goes on; variants that are done are kept in `--out`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.training.common.checkpoint import variant_directory
from outrider.training.common.model import TARGET
from outrider.training.common.optim import Rates
from outrider.training.common.options import add_run_options, run_options
from outrider.training.common.runtime import keep_freed_memory
from outrider.training.common.schedule import Phase, Schedule
from outrider.training.common.workers import SOLO
from outrider.training.target.train import PRESETS, TargetConfig, train_target
from outrider.training.target.unlikelihood import UnlikelihoodConfig

_BASE = PRESETS["cpu"]


def _phases(length: int | None = None, tokens: int | None = None, **changes: Any) -> dict[str, Any]:
    """The base's phases with windows of another length, batches of as many tokens, and `changes`."""

    def changed(phase: Phase) -> Phase:
        window = length or phase.length
        return replace(phase, length=window, rows=(tokens or phase.length * phase.rows) // window, **changes)

    return {"phases": tuple(map(changed, _BASE.phases))}


VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "another seed": {"seed": 1},
    "AdamW, 0.00025": {"rates": Rates(adamw=0.00025)},
    "AdamW, 0.0005": {"rates": Rates(adamw=0.0005)},
    "AdamW, 0.001": {"rates": Rates(adamw=0.001)},
    "AdamW, 0.003": {"rates": Rates(adamw=0.003)},
    "Muon, 0.0075": {"rates": Rates(muon=0.0075)},
    "Muon, 0.015": {"rates": Rates(muon=0.015)},
    "Muon, 0.06": {"rates": Rates(muon=0.06)},
    "6 layers throughout": _phases(num_layers=6),
    "windows of 256 throughout": _phases(length=256),
    "windows of 512 throughout": _phases(length=512),
    "windows of 2048 throughout": _phases(length=2048),
    "batches of 2048": _phases(tokens=2048),
    "batches of 8192": _phases(tokens=8192),
    "decay from the start": {"schedule": Schedule(decay_start=0.02)},
    "decay from 85 %": {"schedule": Schedule(decay_start=0.85)},
    "tied embeddings": {"model": replace(TARGET, tied=True)},
    "no functions by themselves": _phases(functions=0.0),
    "no unlikelihood": {"unlikelihood": UnlikelihoodConfig(start=1.0)},
}
"""What differs from the preset `cpu`: fields of `TargetConfig`."""


def run_variant(name: str, base: TargetConfig, data: Path, out: Path) -> dict[str, Any]:
    """Train a variant, unless it is there, and return its figures; of its files only they are kept."""
    directory = variant_directory(out, name)
    figures = directory / "training.json"
    if not figures.is_file():
        train_target(replace(base, **VARIANTS[name]), data, directory, None, True, SOLO)
        for path in directory.iterdir():
            if path != figures:
                path.unlink()
    return dict(json.loads(figures.read_text()))


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Markdown, one variant a line; loss in nats a token."""
    lines = ["| variant | tokens | loss, last weights | loss, average weights |", "|---|---|---|---|"]
    for name, row in rows.items():
        loss = row["validation_loss"]
        lines.append(f"| {name} | {row['tokens'] / 1e6:.2f} M | {loss['last']:.3f} | {loss['average']:.3f} |")
    return "\n".join(lines)


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.judge.compare_targets", description="Compare recipes."
    )
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--out", type=Path, default=Path("training/runs/compare-targets"))
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    add_run_options(parser)
    parser.set_defaults(minutes=5.0)
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    args = parse_args(sys.argv[1:])
    if args.workers > 1 or args.slice_minutes:
        sys.exit("error: --workers, --slice-minutes: a variant is one short run of one process")
    keep_freed_memory()
    base = replace(_BASE, **run_options(args))
    try:
        rows = {name: run_variant(name, base, args.data, args.out) for name in args.only}
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
    print(table(rows))


if __name__ == "__main__":
    main()
