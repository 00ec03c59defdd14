"""Make the embedded pair: corpus, tokenizer, target, draft, export, evaluation, card. `make pair` runs
this.

    python -m training.pair [--minutes-target 66] [--minutes-draft 20] [--warm-start] [--fresh]

An interrupted run is continued by the same command: finished stages are kept in the run directory, and the
two trainings go on from their last checkpoint. The pair is installed into `--out` only when all of it is
done.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint import write_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class PairConfig:
    """Where things are, and how long the two trainings take."""

    run: Path = Path("training/runs/pair")
    out: Path = Path("models/embedded")
    minutes_target: float = 66.0
    minutes_draft: float = 20.0
    warm_start: bool = False
    seed: int = 0
    num_threads: int = 2


def make_corpus(config: PairConfig) -> None:
    """Corpus, manifest, tokenizer and encoded data in the run directory."""
    from training.corpus import CorpusConfig, build_corpus, save_manifest
    from training.data import encode_corpus
    from training.prompts import make_prompts, save_prompts
    from training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

    corpus = build_corpus(CorpusConfig(seed=config.seed))
    save_manifest(corpus, config.run / "corpus.json")
    save_prompts(make_prompts(corpus.held_out), config.run / "prompts.jsonl")
    if config.warm_start:
        tokenizer = load_tokenizer(config.out / "target")
    else:
        tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, config.run / "tokenizer")
    encode_corpus(corpus, tokenizer, config.run / "data")


def make_target(config: PairConfig) -> None:
    """The target's weights in `target/` of the run."""
    from training.data import load_train
    from training.target import TargetConfig, TargetTrainer

    target = TargetConfig(minutes=config.minutes_target, seed=config.seed, num_threads=config.num_threads)
    trainer = TargetTrainer(target, load_train(config.run / "data"), config.run / "target")
    if not trainer.resume() and config.warm_start:
        trainer.warm_start(config.out / "target")
    trainer.train()
    _copy(TOKENIZER_FILES, config.run / "tokenizer", config.run / "target")


def make_draft(config: PairConfig) -> None:
    """The quantised draft in Hugging Face form in `draft/` of the run."""
    from training.data import load_train
    from training.distill import DistillConfig, Distiller

    draft = DistillConfig(minutes=config.minutes_draft, seed=config.seed + 1, num_threads=config.num_threads)
    distiller = Distiller(draft, config.run / "target", load_train(config.run / "data"), config.run / "draft")
    distiller.resume()
    distiller.train()
    _copy(TOKENIZER_FILES, config.run / "tokenizer", config.run / "draft")


def install(config: PairConfig) -> None:
    """Export the draft to INT4 and put everything into `out`."""
    from edge_client.drafting.export import export_draft

    target = config.out / "target"
    shutil.rmtree(target, ignore_errors=True)
    weights = [path.name for path in (config.run / "target").glob("model*.safetensors*")]
    names = ("config.json", "generation_config.json", *TOKENIZER_FILES, *weights)
    _copy(names, config.run / "target", target)
    shutil.rmtree(config.out / "draft", ignore_errors=True)
    export_draft(config.run / "draft", config.out / "draft")
    _copy(("corpus.json", "prompts.jsonl"), config.run, config.out)
    for model in ("target", "draft"):
        shutil.copyfile(config.run / model / "training.json", config.out / f"training-{model}.json")


def judge(config: PairConfig) -> None:
    """Evaluate what was installed, and write its model card."""
    from training.card import write_card
    from training.evaluate import evaluate

    write_json(config.out / "evaluation.json", evaluate(config.out, config.run / "data"))
    write_card(config.out)


STAGES: dict[str, Callable[[PairConfig], None]] = {
    "corpus": make_corpus,
    "target": make_target,
    "draft": make_draft,
    "install": install,
    "judge": judge,
}


def make_pair(config: PairConfig) -> None:
    """Run the stages that are not done yet."""
    for name, stage in STAGES.items():
        marker = config.run / f".done-{name}"
        if marker.exists():
            print(f"{name}: done before, kept")
            continue
        print(f"{name}: started", flush=True)
        stage(config)
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    print(f"the pair is in {config.out}; its card is {config.out / 'README.md'}")


def _copy(names: tuple[str, ...], source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def parse_args(arguments: list[str]) -> tuple[PairConfig, bool]:
    """The configuration, and whether the run directory is to be emptied first."""
    default = PairConfig()
    parser = argparse.ArgumentParser(prog="python -m training.pair", description="Make the embedded pair.")
    parser.add_argument("--run", type=Path, default=default.run, help="working directory, kept for resuming")
    parser.add_argument("--out", type=Path, default=default.out, help="where the finished pair goes")
    parser.add_argument("--minutes-target", type=float, default=default.minutes_target)
    parser.add_argument("--minutes-draft", type=float, default=default.minutes_draft)
    parser.add_argument(
        "--warm-start", action="store_true", help="train on from the weights and tokenizer in --out"
    )
    parser.add_argument("--fresh", action="store_true", help="forget an earlier run in --run")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", dest="num_threads", type=int, default=default.num_threads)
    options = vars(parser.parse_args(arguments))
    is_fresh = options.pop("fresh")
    if min(options["minutes_target"], options["minutes_draft"]) <= 0:
        parser.error("--minutes-target and --minutes-draft must be above 0")
    return PairConfig(**options), is_fresh


def main() -> None:
    """Command line."""
    from training.runtime import keep_freed_memory

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


if __name__ == "__main__":
    main()
