"""Distil a draft from any local target.

    python -m outrider.training.distill --target DIR --text FILES --out DIR --draft-size 192x2 --minutes 60
    python -m outrider.training.distill --target DIR --text FILES --out DIR --draft DIR --device cuda --tokens 1e8

The target is a Hugging Face directory whose layers are at `model.layers` (Llama, Qwen2, Qwen3 and their kin);
the draft is a new one, or a saved one with the same tokenizer. docs/training.md walks through it.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.training.common.loss import DIVERGENCES
from outrider.training.common.options import add_run_options, run_options, run_training
from outrider.training.common.schedule import Phase
from outrider.training.common.workers import Group
from outrider.training.data.streams import Tokens, load_train
from outrider.training.data.texts import encode_for
from outrider.training.draft.distiller import DistillConfig, Distiller
from outrider.training.draft.drafts import draft_shape, read_config, require_same_tokenizer, saved_shape


def distil(
    config: DistillConfig,
    target: Path,
    stream: Tokens,
    out: Path,
    draft: Path | None,
    reference: Path | None,
    is_resumed: bool,
    group: Group,
) -> dict[str, Any] | None:
    """Runs one worker's part (a slice of it: None); resumes where there is a checkpoint."""
    distiller = Distiller(config, target, stream, out, group, draft_dir=draft, reference_dir=reference)
    if is_resumed and not distiller.resume() and group.is_first:
        print(f"no checkpoint in {out}: starting from the beginning")
    return distiller.train()


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    default = DistillConfig()
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.distill",
        description="Distil a draft from a target.",
        epilog="Then: edge-client draft export OUT DRAFT_DIR",
    )
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory with tokenizer")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, nargs="+", help="files or directories: .txt .md .py, .jsonl")
    text.add_argument("--data", type=Path, help="encoded corpus of `make pair`, in place of --text")
    parser.add_argument("--out", type=Path, required=True, help="where the draft and the checkpoints go")
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--draft", type=Path, help="a saved draft to train on, with the target's tokenizer")
    draft.add_argument("--draft-size", default="192x2", help="hidden size x layers of a new draft")
    parser.add_argument("--context", type=int, help="positions of a new draft (default: the target's)")
    parser.add_argument("--divergence", choices=list(DIVERGENCES), default=default.divergence)
    parser.add_argument("--target-share", type=float, default=default.target_share, metavar="SHARE")
    parser.add_argument("--draft-share", type=float, default=default.draft_share, metavar="SHARE")
    parser.add_argument("--target-text-tokens", type=int, default=default.target_text_tokens, metavar="N")
    parser.add_argument("--sample-temperature", type=float, default=default.sample_temperature)
    parser.add_argument("--sample-rows", type=int, default=default.sample_rows, help="texts at a time")
    parser.add_argument("--reference", type=Path, help="a draft distilled before, for --easy-share")
    parser.add_argument("--easy-share", type=float, default=default.easy_share, metavar="SHARE")
    parser.add_argument("--quantize-start", type=float, default=default.quantize_start, metavar="SHARE")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of an optimiser step")
    parser.add_argument("--rates-scale", type=float, help="factor on the learning rates (0.1 with --draft)")
    add_run_options(parser)
    return parser.parse_args(arguments)


def make_config(args: argparse.Namespace) -> DistillConfig:
    """Raises ValueError naming the option that cannot be."""
    if args.batch_tokens < args.length or min(args.length, args.target_text_tokens, args.sample_rows) < 1:
        raise ValueError(f"--batch-tokens {args.batch_tokens}: at least one window of --length {args.length}")
    config = DistillConfig(
        phases=(Phase(0.0, args.length, args.batch_tokens // args.length),),
        divergence=args.divergence,
        target_share=args.target_share,
        draft_share=args.draft_share,
        target_text_tokens=args.target_text_tokens,
        sample_rows=args.sample_rows,
        sample_temperature=args.sample_temperature,
        easy_share=args.easy_share,
        quantize_start=args.quantize_start,
    )
    if args.draft is None:
        target = read_config(args.target)
        context = args.context or target["max_position_embeddings"]
        config = replace(config, model=draft_shape(args.draft_size, target["vocab_size"], context))
    else:
        require_same_tokenizer(args.target, args.draft)
        config = replace(config, model=saved_shape(args.draft))
    scale = args.rates_scale or (1.0 if args.draft is None else 0.1)
    return replace(config, rates=config.rates.times(scale), **run_options(args))


def load_stream(args: argparse.Namespace) -> Tokens:
    """Returns the corpus, encoded. Raises ValueError or FileNotFoundError naming the file."""
    return encode_for(args.target, args.text) if args.data is None else load_train(args.data)


def main() -> None:
    """Runs the command."""
    args = parse_args(sys.argv[1:])

    def prepare() -> Callable[[Group], dict[str, Any] | None]:
        config, stream = make_config(args), load_stream(args)
        return partial(distil, config, args.target, stream, args.out, args.draft, args.reference, args.resume)

    if figures := run_training("draft", args.workers, prepare):
        print(f"draft: {figures['tokens'] / 1e6:.2f} M tokens, {args.divergence} {figures['loss']:.3f}")
        print(f"next: edge-client draft export {args.out} DRAFT_DIR")


if __name__ == "__main__":
    main()
