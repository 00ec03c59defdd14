"""Build the bank of pairs: `python -m outrider.training.bank [--only embedded,prose] [--fresh]`.

Each target is trained by `outrider.training.target`, each draft by `outrider.training.distill`, on one thread,
and exported as `edge-client draft export` does. What is done is kept; an interrupted training goes on.
"""

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.experiments.shared.command import run_command
from outrider.training.bank.pairs import BANK, PROMPT_LOOKUP, RUN, BankDraft, BankFolder, BankTarget, chosen
from outrider.training.bank.texts import KINDS
from outrider.training.common.model import ModelConfig, create_model, save_model
from outrider.training.common.runtime import keep_freed_memory
from outrider.training.common.schedule import Phase
from outrider.training.common.workers import SOLO
from outrider.training.data.corpus import save_manifest
from outrider.training.data.prompts import save_prompts
from outrider.training.data.streams import encode_corpus, load_train
from outrider.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from outrider.training.distill import distil
from outrider.training.draft.distiller import DistillConfig
from outrider.training.draft.drafts import copy_tokenizer, draft_shape, read_config
from outrider.training.target.train import TargetConfig, train_target
from outrider.training.target.unlikelihood import UnlikelihoodConfig

SEED = 19
TARGET = TargetConfig(
    phases=(Phase(0.0, length=256, rows=4, num_layers=2), Phase(0.5, length=256, rows=4, num_layers=4)),
    unlikelihood=UnlikelihoodConfig(start=2.0),  # of the budget: never
    validation_tokens=8192,
    seed=SEED,
    num_threads=1,
)
"""The embedded target's recipe for a few minutes: no functions, no unlikelihood."""
DRAFT = DistillConfig(phases=(Phase(0.0, length=256, rows=4),), seed=SEED, num_threads=1)
TARGET_TEXT_SHARE = 0.25  # of a draft's budget: what the target writes for it


def build_bank(root: Path, targets: tuple[BankTarget, ...] = BANK) -> None:
    """Builds what is not there yet."""
    for target in targets:
        folder = BankFolder(root, target)
        if not (folder.work / "data" / "train.npz").is_file():
            print(f"{target.name}: texts", flush=True)
            _make_texts(folder)
        if target.model is not None and not (folder.target_dir / "training.json").is_file():
            print(f"{target.name}: target", flush=True)
            _train_target(folder, target.model)
        for draft in target.drafts:
            if draft.strategy != PROMPT_LOOKUP and not (folder.draft_dir(draft) / "draft.json").is_file():
                print(f"{target.name}: draft {draft.name}", flush=True)
                _make_draft(folder, draft)
        print(f"{target.name}: done", flush=True)


def _make_texts(folder: BankFolder) -> None:
    corpus, prompts = KINDS[folder.target.texts]()
    save_manifest(corpus, folder.work / "corpus.json")
    save_prompts(prompts, folder.prompts)
    model = folder.target.model
    if model is None:
        tokenizer = load_tokenizer(folder.target_dir)
    else:
        tokenizer = train_tokenizer(corpus.train, model.vocab_size)
        save_tokenizer(tokenizer, folder.target_dir, model.context)
    encode_corpus(corpus, tokenizer, folder.work / "data")


def _train_target(folder: BankFolder, model: ModelConfig) -> None:
    shallow, deep = TARGET.phases
    phases = (replace(shallow, num_layers=model.num_layers // 2), replace(deep, num_layers=model.num_layers))
    config = replace(TARGET, model=model, phases=phases, tokens=folder.target.tokens)
    train_target(config, folder.work / "data", folder.target_dir, None, True, SOLO)


def _make_draft(folder: BankFolder, draft: BankDraft) -> None:
    out = folder.draft_dir(draft)
    if draft.first_layers:
        export_draft(folder.target_dir, out, first_layers=draft.first_layers)
        return
    target = read_config(folder.target_dir)
    shape = draft_shape(draft.size, target["vocab_size"], target["max_position_embeddings"])
    made = folder.work / "training" / draft.name
    if draft.tokens:
        num_written = round(TARGET_TEXT_SHARE * draft.tokens)
        config = replace(DRAFT, model=shape, tokens=draft.tokens, target_text_tokens=num_written)
        distil(config, folder.target_dir, load_train(folder.work / "data"), made, None, None, True, SOLO)
    else:
        torch.manual_seed(SEED)
        save_model(create_model(shape), made, torch.float32)
        copy_tokenizer(folder.target_dir, made)
    export_draft(made, out)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.bank", description="Build the bank of pairs."
    )
    parser.add_argument("--out", type=Path, default=RUN, metavar="DIR", help="where the pairs go")
    parser.add_argument("--only", metavar="NAMES", help=", ".join(target.name for target in BANK))
    parser.add_argument("--fresh", action="store_true", help="build anew what is there")
    arguments = parser.parse_args()

    def build() -> int:
        targets = chosen(arguments.only)
        keep_freed_memory()
        for target in targets if arguments.fresh else ():
            shutil.rmtree(arguments.out / target.name, ignore_errors=True)
        build_bank(arguments.out, targets)
        return 0

    run_command("pair-bank", build)
