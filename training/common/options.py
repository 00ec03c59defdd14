"""The command-line options that every training has."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from outrider.training.common.compute import Compute
from outrider.training.common.runtime import keep_freed_memory
from outrider.training.common.workers import Group, run_workers


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of budget, slices, workers and device."""
    parser.add_argument("--minutes", type=float, help="budget of training time")
    parser.add_argument("--tokens", type=float, help="budget of tokens seen (1e9), in place of --minutes")
    parser.add_argument(
        "--slice-minutes", type=float, help="save and stop after this long; --resume goes on with the rest"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread that share a batch")
    parser.add_argument("--threads", type=int, help="threads of a single process (default 2)")
    parser.add_argument("--micro-tokens", type=int, help="tokens a forward pass: less takes less memory")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (bfloat16)")
    parser.add_argument(
        "--bfloat16", action="store_true", help="on a CPU too: fast where it has AVX512_BF16 or AMX"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers (a minute a shape)")


def run_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `RunConfig` that were given. Raises SystemExit naming an option that cannot
    be."""
    for name in ("minutes", "tokens", "slice_minutes", "workers", "threads", "micro_tokens"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise SystemExit(f"error: --{name.replace('_', '-')} must be above 0")
    if args.workers > 1 and args.device != "cpu":
        raise SystemExit("error: --workers is for CPUs; a CUDA device takes one process")
    given = {
        "minutes": args.minutes,
        "tokens": args.tokens and int(args.tokens),
        "slice_minutes": args.slice_minutes,
        "num_threads": args.threads,
        "micro_tokens": args.micro_tokens,
        "seed": args.seed,
    }
    if args.minutes is not None and args.tokens is None:
        given["tokens"] = 0
    options = {name: value for name, value in given.items() if value is not None}
    if options.get("tokens") == 0:
        options["tokens"] = None  # minutes were asked for, whatever the preset says
    return options | {"compute": _compute(args)}


def _compute(args: argparse.Namespace) -> Compute:
    try:
        return Compute(args.device, args.compile, args.bfloat16)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error


Figures = dict[str, Any]


def run_training(
    name: str, num_workers: int, prepare: Callable[[], Callable[[Group], Figures | None]]
) -> Figures | None:
    """Runs the task that `prepare` makes and returns its figures; None, with a line, where the slice ended first.

    Raises SystemExit with what is wrong.
    """
    keep_freed_memory()
    try:
        figures = run_workers(num_workers, prepare())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command with --resume goes on from the last checkpoint")
    if figures is None:
        print(f"{name}: slice over; the same command with --resume goes on")
    return figures
