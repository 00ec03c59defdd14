"""Make the embedded pair: corpus, tokenizer, target, draft, export, evaluation, card. `make pair` runs this.

    python -m outrider.training.pair [--minutes-target 66] [--minutes-draft 20] [--workers 2] [--warm-start] [--fresh]
    python -m outrider.training.pair --preset gpu30m --corpus large --keep-tokenizer --device cuda --slice-minutes 9

An interrupted run is continued by the same command: finished stages are kept in the run directory, and the
trainings go on from their last checkpoint. The pair is installed into `--out` only when all of it is
done.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.training.common.checkpoint import write_json
from outrider.training.common.compute import Compute
from outrider.training.common.workers import run_workers

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PRESET_NAMES = (
    "cpu",
    "cpu-warm",
    "gpu30m",
)  # of outrider.training.target.train, which takes a second to import
CORPUS_NAMES = ("small", "large")  # of outrider.training.data.corpus


@dataclass(frozen=True)
class PairConfig:
    """Says where things are, and what the two trainings may take."""

    run: Path = Path("training/runs/pair")
    out: Path = Path("models/embedded")
    preset: str = "cpu"
    corpus: str = "small"
    draft_size: str = "192x2"
    minutes_target: float | None = None
    """0 with `warm_start`: the target in `out` as it is."""
    tokens_target: int | None = None
    minutes_draft: float | None = None
    tokens_draft: int | None = None
    target_text_tokens: int | None = None
    """What the target writes for the draft to learn from; None: as much as the preset says."""
    slice_minutes: float | None = None
    """The command saves and stops after this long in one training; the same command goes on."""
    warm_start: bool = False
    draft: Path | None = None
    """A draft to distil on from at half the learning rates, INT4 or not; None for a new one."""
    keep_tokenizer: bool = False
    until: str = "judge"
    """The last stage to run."""
    seed: int = 0
    num_threads: int = 2
    num_workers: int = 1
    device: str = "cpu"
    is_compiled: bool = False


def _make_corpus(config: PairConfig) -> bool:
    from outrider.training.data.corpus import CORPORA, build_corpus, save_manifest
    from outrider.training.data.prompts import make_prompts, save_prompts
    from outrider.training.data.streams import encode_corpus
    from outrider.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

    corpus = build_corpus(replace(CORPORA[config.corpus], seed=config.seed))
    save_manifest(corpus, config.run / "corpus.json")
    save_prompts(make_prompts(corpus.held_out), config.run / "prompts.jsonl")
    if config.warm_start or config.keep_tokenizer:
        tokenizer = load_tokenizer(config.out / "target")
    else:
        tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, config.run / "tokenizer")
    encode_corpus(corpus, tokenizer, config.run / "data")
    return True


def _make_target(config: PairConfig) -> bool:
    """Returns False where the slice ended first. Where no minutes are given for more, the target of `out`
    is taken."""
    from outrider.training.target.train import PRESETS, train_target

    if config.minutes_target == 0:
        shutil.copytree(config.out / "target", config.run / "target", dirs_exist_ok=True)
        _copy(("training-target.json", "training-polish.json"), config.out, config.run)
        return True
    fields = _run_fields(config, config.minutes_target, config.tokens_target)
    run = replace(PRESETS[config.preset], seed=config.seed, **fields)
    warm_start = config.out / "target" if config.warm_start else None
    out = config.run / "target"
    task = partial(train_target, run, config.run / "data", out, warm_start, True)
    if run_workers(config.num_workers, task) is None:
        return False
    _copy(TOKENIZER_FILES, config.run / "tokenizer", out)
    return True


def _make_polished(config: PairConfig) -> bool:
    from outrider.training.target.polish import PRESETS, polish
    from outrider.training.target.train import PRESETS as TARGETS

    preset = PRESETS["gpu" if config.preset.startswith("gpu") else "cpu"]
    fields = _run_fields(config, None, None)
    run = replace(preset.training, model=TARGETS[config.preset].model, seed=config.seed, **fields)
    out = config.run / "polished"
    task = partial(polish, replace(preset, training=run), config.run / "data", config.run / "target", out)
    if run_workers(config.num_workers, task) is None:
        return False
    _copy(TOKENIZER_FILES, config.run / "tokenizer", out)
    return True


def _make_draft(config: PairConfig) -> bool:
    from outrider.training.data.streams import load_code
    from outrider.training.distill import distil
    from outrider.training.draft.distiller import PRESETS
    from outrider.training.draft.drafts import draft_shape, read_config, saved_shape
    from outrider.training.draft.restore import is_graph, restore_draft

    fields = _run_fields(config, config.minutes_draft, config.tokens_draft)
    if config.target_text_tokens is not None:
        fields["target_text_tokens"] = config.target_text_tokens
    preset = PRESETS["gpu" if config.preset.startswith("gpu") else "cpu"]
    draft_dir = config.draft
    if draft_dir is None:
        target = read_config(config.run / "polished")
        shape = draft_shape(config.draft_size, target["vocab_size"], target["max_position_embeddings"])
        rates = preset.rates
    else:
        if is_graph(draft_dir):
            restored = config.run / "draft-before"
            restore_draft(draft_dir, restored)
            draft_dir = restored
        shape, rates = saved_shape(draft_dir), preset.rates.times(0.5)
    draft = replace(preset, model=shape, rates=rates, seed=config.seed + 1, **fields)
    stream = load_code(config.run / "data")  # the target writes on from either half
    out = config.run / "draft"
    task = partial(distil, draft, config.run / "polished", stream, out, draft_dir, None, True)
    return run_workers(config.num_workers, task) is not None


def _run_fields(config: PairConfig, minutes: float | None, tokens: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_threads": config.num_threads,
        "slice_minutes": config.slice_minutes,
        "compute": Compute(config.device, config.is_compiled),
    }
    if tokens is not None:
        fields["tokens"] = tokens
    elif minutes is not None:
        fields |= {"minutes": minutes, "tokens": None}
    return fields


def install(config: PairConfig) -> bool:
    """Export the draft to INT4 and put everything into `out`."""
    from outrider.edge_client.drafting.export.dropout_graph import add_dropout
    from outrider.edge_client.drafting.export.exporter import export_draft

    target = config.out / "target"
    shutil.rmtree(target, ignore_errors=True)
    weights = [path.name for path in (config.run / "polished").glob("model*.safetensors*")]
    names = ("config.json", "generation_config.json", *TOKENIZER_FILES, *weights)
    _copy(names, config.run / "polished", target)
    shutil.rmtree(config.out / "draft", ignore_errors=True)
    export_draft(config.run / "draft", config.out / "draft")
    add_dropout(config.out / "draft")
    _copy(("corpus.json", "prompts.jsonl"), config.run, config.out)
    for directory, name in (("target", "target"), ("polished", "polish"), ("draft", "draft")):
        record = config.run / directory / "training.json"
        if record.is_file():  # not of a target that was taken as it is
            shutil.copyfile(record, config.out / f"training-{name}.json")
    return True


def judge(config: PairConfig) -> bool:
    """Evaluate what was installed, and write its model card."""
    from outrider.training.judge.evaluate import evaluate
    from outrider.training.pair.card import write_card

    write_json(config.out / "evaluation.json", evaluate(config.out, config.run / "data"))
    write_card(config.out)
    return True


STAGES: dict[str, Callable[[PairConfig], bool]] = {
    "corpus": _make_corpus,
    "target": _make_target,
    "polish": _make_polished,
    "draft": _make_draft,
    "install": install,
    "judge": judge,
}


def make_pair(config: PairConfig) -> None:
    """Run the stages that are not done yet."""
    for name, stage in STAGES.items():
        marker = config.run / f".done-{name}"
        if marker.exists():
            print(f"{name}: done before, kept")
        elif not _run_stage(name, stage, config, marker):
            return
        if name == config.until != "judge":
            print(f"{name}: the same command without --until goes on")
            return
    print(f"the pair is in {config.out}; its card is {config.out / 'README.md'}")


def _run_stage(name: str, stage: Callable[[PairConfig], bool], config: PairConfig, marker: Path) -> bool:
    print(f"{name}: started", flush=True)
    if not stage(config):
        print(f"{name}: slice over; the same command (without --fresh) goes on")
        return False
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    return True


def _copy(names: tuple[str, ...], source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def parse_args(arguments: list[str]) -> tuple[PairConfig, bool]:
    """Returns the configuration, and whether the run directory is to be emptied first."""
    default = PairConfig()
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.pair", description="Make the embedded pair."
    )
    parser.add_argument("--run", type=Path, default=default.run, help="working directory, kept for resuming")
    parser.add_argument("--out", type=Path, default=default.out, help="where the finished pair goes")
    parser.add_argument("--preset", choices=PRESET_NAMES, default=default.preset, help="of the target")
    parser.add_argument("--corpus", choices=CORPUS_NAMES, default=default.corpus)
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--draft-size", default=default.draft_size, help="hidden size x layers of a new draft")
    draft.add_argument("--draft", type=Path, help="a draft to distil on: draft/ of a --run or of --out")
    parser.add_argument(
        "--minutes-target",
        type=float,
        help="budget; 66 where the preset has no other; 0 with --warm-start: the target in --out as it is",
    )
    parser.add_argument("--tokens-target", type=_tokens, help="budget in tokens (1e9), in place of minutes")
    parser.add_argument("--minutes-draft", type=float, help="budget; 20 where nothing is given")
    parser.add_argument("--tokens-draft", type=_tokens)
    parser.add_argument("--target-text-tokens", type=_tokens, help="the target writes for the draft")
    parser.add_argument("--slice-minutes", type=float, help="save and stop after this long; run again")
    parser.add_argument(
        "--warm-start", action="store_true", help="train on from the weights and tokenizer in --out"
    )
    parser.add_argument("--keep-tokenizer", action="store_true", help="take the tokenizer in --out")
    parser.add_argument("--until", choices=list(STAGES), default=default.until, help="the last stage to run")
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run in --run")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", dest="num_threads", type=int, default=default.num_threads)
    parser.add_argument(
        "--workers", dest="num_workers", type=int, help="processes of one thread (default: 2)"
    )
    parser.add_argument("--device", default=default.device, help="cpu or cuda (bfloat16)")
    parser.add_argument("--compile", dest="is_compiled", action="store_true", help="compile decoder layers")
    options = vars(parser.parse_args(arguments))
    is_fresh = options.pop("fresh")
    budgets = ["minutes_target", "minutes_draft", "tokens_target", "tokens_draft"]
    budgets += ["target_text_tokens", "slice_minutes"]
    if options["warm_start"] and options["minutes_target"] == 0:
        budgets.remove("minutes_target")
    for name in budgets:
        if options[name] is not None and options[name] <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if options["num_workers"] is None:
        options["num_workers"] = min(2, os.cpu_count() or 1) if options["device"] == "cpu" else 1
    if options["num_workers"] < 1:
        parser.error("--workers must be above 0")
    if options["num_workers"] > 1 and options["device"] != "cpu":
        parser.error("--workers is for CPUs; a CUDA device takes one process")
    return PairConfig(**options), is_fresh


def _tokens(text: str) -> int:
    return int(float(text))


def main() -> None:
    """Runs the command."""
    from outrider.training.common.runtime import keep_freed_memory

    config, is_fresh = parse_args(sys.argv[1:])
    keep_freed_memory()
    if is_fresh:
        shutil.rmtree(config.run, ignore_errors=True)
    try:
        make_pair(config)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from the last checkpoint")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
