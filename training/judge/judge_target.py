"""Measure a target alone, between its trainings: held-out loss, and what it writes greedily behind the heads
of held-out functions.

    python -m outrider.training.judge.judge_target training/runs/pair/target training/runs/pair/polished
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from outrider.training.common.metrics import repeated_share
from outrider.training.data.functions import first_function, is_python
from outrider.training.data.prompts import load_prompts
from outrider.training.data.streams import load_held_out, windows
from outrider.training.data.tokenizer import load_tokenizer
from outrider.training.draft.sampling import continue_one

WINDOW, TOKENS_PER_FILE, NEW_TOKENS = 1024, 4096, 256


@dataclass(frozen=True)
class TargetFigures:
    """Shares are of the prompts; a function is the text up to its end, as `pair.parse` has it."""

    bits_per_byte: float
    parse: float
    """Functions that Python's parser accepts together with their prompt."""
    ended: float
    """Texts in which the function comes to its end, or the text to its."""
    repeated_12grams: float
    tokens: float
    """A text's, on average."""
    num_prompts: int


def judge_target(target: Path, data: Path, prompts: Path) -> TargetFigures:
    """Figures of a saved target; `data` is an encoded corpus, `prompts` a JSONL file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.float32).eval()
    tokenizer = load_tokenizer(target)
    texts: list[list[int]] = []
    parsed = ended = 0
    heads = [item.prompt for item in load_prompts(prompts)]
    for head in tqdm(heads, desc="greedy text", disable=None):
        new = continue_one(model, tokenizer.encode(head).ids, NEW_TOKENS)
        text = tokenizer.decode(new)
        function = first_function(text)
        parsed += is_python(head, function)
        ended += new[-1] == 0 or function != text
        texts.append(new)
    return TargetFigures(
        bits_per_byte=_bits_per_byte(model, tokenizer, data),
        parse=parsed / len(heads),
        ended=ended / len(heads),
        repeated_12grams=repeated_share(texts),
        tokens=float(np.mean([len(text) for text in texts])),
        num_prompts=len(heads),
    )


@torch.no_grad()
def _bits_per_byte(model: Any, tokenizer: Any, data: Path) -> float:
    nats = num_bytes = 0.0
    for tokens in tqdm(load_held_out(data).values(), desc="held-out files", disable=None):
        bytes_per_token = len(tokenizer.decode(tokens[1:].tolist()).encode()) / (len(tokens) - 1)
        for window in windows(tokens[: TOKENS_PER_FILE + 1], WINDOW):
            ids = torch.from_numpy(window)
            logits = model(input_ids=ids[None, :-1]).logits[0]
            nats += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
            num_bytes += (len(window) - 1) * bytes_per_token
    return nats / math.log(2) / num_bytes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.training.judge.judge_target", description="Measure a target."
    )
    parser.add_argument("targets", type=Path, nargs="+", help="Hugging Face directories with their tokenizer")
    parser.add_argument("--data", type=Path, default=Path("training/runs/pair/data"))
    parser.add_argument("--prompts", type=Path, default=Path("models/embedded/prompts.jsonl"))
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    args = parser.parse_args()
    for target in args.targets:
        figures = judge_target(target, args.data, args.prompts)
        if args.json:
            print(json.dumps({"target": str(target)} | asdict(figures)), flush=True)
        else:
            print(
                f"{target}: {figures.bits_per_byte:.3f} bits per byte; of {figures.num_prompts} greedy texts "
                f"{figures.parse:.0%} parse, {figures.ended:.0%} end, {figures.tokens:.0f} tokens a text, "
                f"{figures.repeated_12grams:.0%} of the 12-grams are repeats",
                flush=True,
            )


if __name__ == "__main__":
    main()
