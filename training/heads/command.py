"""Train heads that draft for any local target.

python -m outrider.training.heads medusa|hydra|eagle|layerskip --target DIR --text FILES|--data DIR --out DIR
python -m outrider.training.heads layers --target DIR --text FILES|--data DIR --out DIR     # `layers`
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.training.common.options import add_run_options, run_options, run_training
from outrider.training.common.schedule import Phase
from outrider.training.common.workers import Group
from outrider.training.data.streams import Tokens, load_code
from outrider.training.data.texts import encode_for
from outrider.training.heads.directory import read_heads
from outrider.training.heads.eagle import EagleConfig, EagleTrainer
from outrider.training.heads.frozen import FrozenTargetConfig, FrozenTargetTrainer
from outrider.training.heads.joint import JointConfig, JointTrainer
from outrider.training.heads.layerskip import LayerSkipConfig, LayerSkipTrainer
from outrider.training.heads.model import KINDS, HeadsShape
from outrider.training.heads.moving import TARGET_FOLDER
from outrider.training.heads.trainer import HeadsConfig, HeadsTrainer

EAGLE, LAYERSKIP, LAYERS = "eagle", "layerskip", "layers"
# Tokens of a window. The embedded target trained by layerskip in windows of 256, lost .04 nats a token on the first 512
# of held-out files, and .19 on the second 1,024.
LENGTH, WHOLE_LENGTH = 256, 1024
TRAINERS: dict[type[FrozenTargetConfig], type[FrozenTargetTrainer]] = {
    HeadsConfig: HeadsTrainer,
    JointConfig: JointTrainer,
    EagleConfig: EagleTrainer,
    LayerSkipConfig: LayerSkipTrainer,
}


def train_heads(
    config: FrozenTargetConfig,
    target: Path,
    stream: Tokens,
    out: Path,
    heads: Path | None,
    text_of: Path | None,
    is_resumed: bool,
    group: Group,
) -> dict[str, Any] | None:
    """Runs one worker's part (a slice of it: None); resumes where there is a checkpoint."""
    trainer = TRAINERS[type(config)](config, target, stream, out, group, heads_dir=heads, text_of=text_of)
    if is_resumed and not trainer.resume() and group.is_first:
        print(f"no checkpoint in {out}: starting from the beginning")
    return trainer.train()


def parse_args(arguments: list[str]) -> argparse.Namespace:
    """Returns the options; exits naming what is wrong with them."""
    default, skip = JointConfig(), LayerSkipConfig()
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.heads",
        description="Train heads that draft for a target.",
        epilog=f"`{LAYERS} --help` is of the search for layers of a target that draft as they are.",
    )
    parser.add_argument("kind", choices=[*KINDS, EAGLE, LAYERSKIP])
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face directory with tokenizer")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", type=Path, nargs="+", help="files or directories: .txt .md .py, .jsonl")
    text.add_argument("--data", type=Path, help="encoded corpus of `make pair`, in place of --text")
    parser.add_argument("--out", type=Path, required=True, help="where the heads and the checkpoints go")
    parser.add_argument("--heads", type=Path, help="--out of another run: heads to train on")
    parser.add_argument("--num-heads", type=int, default=default.shape.num_heads, metavar="N")
    parser.add_argument(
        "--num-blocks", type=int, default=default.shape.num_blocks, metavar="N", help="a head"
    )
    parser.add_argument(
        "--steps", type=int, default=EagleConfig.num_steps, metavar="N", help="eagle: drafted tokens"
    )
    parser.add_argument(
        "--feature-layers",
        type=int,
        nargs=3,
        default=(),
        metavar="N",
        help="eagle: after which of the target's layers its states are read; the number of layers: the final norm",
    )
    parser.add_argument("--target-share", type=float, default=default.target_share, metavar="SHARE")
    parser.add_argument("--target-text-tokens", type=int, default=default.target_text_tokens, metavar="N")
    parser.add_argument("--text-of", type=Path, help="--out of another run: what the target wrote for it")
    parser.add_argument("--sample-temperature", type=float, default=default.sample_temperature)
    parser.add_argument("--sample-rows", type=int, default=default.sample_rows, help="texts at a time")
    parser.add_argument("--rows-share", type=float, default=default.rows_share, metavar="SHARE")
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help=f"tokens of a window (default {LENGTH}; layerskip: {WHOLE_LENGTH}, as the whole target learns)",
    )
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens of an optimiser step")
    parser.add_argument("--rates-scale", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument("--joint", action="store_true", help="train the target too, into OUT/target")
    parser.add_argument("--heads-alone", type=float, default=default.heads_alone, metavar="SHARE")
    parser.add_argument("--heads-weight", type=float, default=default.heads_weight, metavar="W")
    parser.add_argument(
        "--target-rates",
        type=float,
        metavar="FACTOR",
        help=f"of the target that is trained too (default {default.target_rates}; layerskip: {skip.target_rates})",
    )
    parser.add_argument(
        "--exit-layer", type=int, default=skip.exit_layer, metavar="N", help="layerskip: layers that draft"
    )
    parser.add_argument("--layer-dropout", type=float, default=skip.layer_dropout, metavar="SHARE")
    parser.add_argument("--exit-weight", type=float, default=skip.exit_weight, metavar="W")
    parser.add_argument("--exit-scale", type=float, default=skip.exit_scale, metavar="SCALE")
    add_run_options(parser)
    return parser.parse_args(arguments)


def make_config(args: argparse.Namespace) -> FrozenTargetConfig:
    """Raises ValueError naming the option that cannot be."""
    length = args.length
    if length is None:
        length = WHOLE_LENGTH if args.kind == LAYERSKIP else LENGTH
    if args.batch_tokens < length or min(length, args.target_text_tokens, args.sample_rows) < 1:
        raise ValueError(f"--batch-tokens {args.batch_tokens}: at least one window of --length {length}")
    shared = dict(
        phases=(Phase(0.0, length, args.batch_tokens // length),),
        target_share=args.target_share,
        target_text_tokens=args.target_text_tokens,
        sample_rows=args.sample_rows,
        sample_temperature=args.sample_temperature,
        rows_share=args.rows_share,
        rates=FrozenTargetConfig().rates.times(args.rates_scale),
        **run_options(args),
    )
    if args.joint and args.kind not in KINDS:
        raise ValueError("--joint: with medusa and hydra")
    rates = {} if args.target_rates is None else {"target_rates": args.target_rates}
    if args.kind == LAYERSKIP:
        own = {
            name: getattr(args, name) for name in ("exit_layer", "layer_dropout", "exit_weight", "exit_scale")
        }
        return LayerSkipConfig(**shared, **own, **rates)
    if args.kind == EAGLE:
        return EagleConfig(num_steps=args.steps, feature_layers=tuple(args.feature_layers), **shared)
    shape = HeadsShape(args.kind, args.num_heads, args.num_blocks)
    if args.heads is not None:
        shape = replace(read_heads(args.heads)[0].shape, kind=args.kind)
    if not args.joint:
        return HeadsConfig(shape=shape, **shared)
    alone = {name: getattr(args, name) for name in ("heads_alone", "heads_weight")}
    return JointConfig(shape=shape, **shared, **alone, **rates)


def main() -> None:
    """Runs the command."""
    if sys.argv[1:2] == [LAYERS]:
        from outrider.training.heads.layers import main as find_layers  # with the verifier's own forwards

        find_layers(sys.argv[2:])
        return
    args = parse_args(sys.argv[1:])

    def prepare() -> Callable[[Group], dict[str, Any] | None]:
        config = make_config(args)
        stream = encode_for(args.target, args.text) if args.data is None else load_code(args.data)
        return partial(
            train_heads, config, args.target, stream, args.out, args.heads, args.text_of, args.resume
        )

    if figures := run_training("heads", args.workers, prepare):
        print(f"heads: {figures['tokens'] / 1e6:.2f} M tokens, fkl {figures['loss']:.3f}: {args.out}")
        if args.joint or args.kind == LAYERSKIP:
            print(f"target: fkl {figures['divergence']:.3f} from what it was: {args.out / TARGET_FOLDER}")
