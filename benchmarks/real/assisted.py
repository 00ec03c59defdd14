"""Speculative decoding over loopback beside transformers' assisted generation of the same pair, greedy.

The pairs are those of the bank whose draft was trained. transformers reads the embedded pair's draft dequantised from
its INT4 graph, the others as they were before INT4. Both sides have all cores for the target; texts take turns and are
compared token by token.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.real.points import RealPoint
from benchmarks.real.running import ask_edge, find_draft, find_pair, start_edge
from benchmarks.results_file import Found
from benchmarks.timing import median_ratio
from outrider.common.errors import UsageError
from outrider.common.process.quiet_loading import quiet_loading
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.results import Measure, at_least, judged
from outrider.models import EMBEDDED
from outrider.training.draft.restore import restore_draft

EMBEDDED_PAIR = "embedded/trained"
PAIRS = (EMBEDDED_PAIR, "embedded/short", "prose/trained", "tables/trained")
NUM_PROMPTS, NUM_TOKENS = 8, 128


class AssistedTarget:
    """Decodes greedily with transformers' assisted generation."""

    def __init__(self, target_dir: Path, draft_dir: Path, num_threads: int) -> None:
        import torch

        torch.set_num_threads(num_threads)
        self._target, self._draft = (_load(directory) for directory in (target_dir, draft_dir))

    def generate(self, prompt_ids: Sequence[int], num_new: int) -> tuple[float, list[int]]:
        """Returns the seconds of a text, and its token ids."""
        import torch

        ids = torch.tensor([list(prompt_ids)])
        begin_s = time.perf_counter()
        found = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self._draft,
            do_sample=False,
            max_new_tokens=num_new,
        )
        return time.perf_counter() - begin_s, found[0, len(prompt_ids) :].tolist()


def _load(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    with quiet_loading(hf_logging):
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def run() -> Found:
    """Judges the embedded pair; the others stand beside it. Raises `UsageError` where a pair is not built."""
    num_threads = os.cpu_count() or 1
    ratios, details = dict[str, float](), dict[str, Any]()
    for name in PAIRS:
        target, draft = name.split("/")
        ratios[name], details[name] = compare(target, draft, num_threads)
        print(f"{name}: {details[name]}", flush=True)
    what = "speculative over loopback : transformers assisted generation, tokens/s, greedy"
    rows = [judged("real.vs_hf_assisted", what, ratios.pop(EMBEDDED_PAIR), "ratio", at_least(6.0))]
    others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    beside = Measure(
        "real.vs_hf_assisted_bank", f"the same, lowest of {others}", min(ratios.values()), "ratio"
    )
    return [*rows, beside], details


def compare(target: str, draft: str, num_threads: int) -> tuple[float, dict[str, Any]]:
    """Returns the ratio of tokens a second of one pair, and what it is made of."""
    pair = find_pair(RealPoint(0, target, draft, 0.0, NUM_TOKENS, 0.0, 0.0, 0.0, True))
    flags = ("--log-level", "warning", "--num-threads", str(num_threads), "--draft", "none")
    with _weights_of(target, draft) as weights:
        assisted = AssistedTarget(Path(pair.target_dir), weights, num_threads)
    tokenizer = EdgeTokenizer(Path(pair.target_dir) / "tokenizer.json")
    seconds: dict[str, list[float]] = {"ours": [], "assisted": [], "again": []}
    num_other = 0
    with running_verifier("--target", pair.target_dir, *flags) as verifier, start_edge() as edge:
        settings = {
            "verifier": verifier.address,
            "draft": pair.draft_dir,
            "mode": "speculative",
            "temperature": 0.0,
            "ignore_eos": True,
            "on_timeout": "wait",
            "max_new_tokens": NUM_TOKENS,
        }
        for number, prompt in enumerate(pair.prompts[:NUM_PROMPTS]):
            ids = tokenizer.encode(prompt.text)
            if number == 0:
                ask_edge(edge, "ours", settings, prompt, 1)
                assisted.generate(ids, 8)
            ours = ask_edge(edge, "ours", settings, prompt, 1)["request"]
            first_s, _ = assisted.generate(ids, 1)
            whole_s, text = assisted.generate(ids, NUM_TOKENS)
            again = ask_edge(edge, "again", settings, prompt, 1)["request"]
            seconds["ours"].append(ours["tpot_ms"] / 1e3)
            seconds["assisted"].append((whole_s - first_s) / (NUM_TOKENS - 1))
            seconds["again"].append(again["tpot_ms"] / 1e3)
            num_other += ours["token_ids"] != text
    return median_ratio(seconds["assisted"], seconds["ours"]), {
        "ms_per_token": {name: [round(1e3 * s, 2) for s in each] for name, each in seconds.items()},
        "a_a": round(median_ratio(seconds["again"], seconds["ours"]), 3),
        "num_other_texts": num_other,
        "load_average": round(os.getloadavg()[0], 2),
    }


@contextlib.contextmanager
def _weights_of(target: str, draft: str) -> Iterator[Path]:
    """Yields the draft as transformers reads it. Raises `UsageError` where it is not built."""
    folder, found = find_draft(target, draft)
    graph = folder.draft_dir(found)
    directory = folder.work / "training" / draft
    if (directory / "config.json").is_file():
        yield directory
    elif graph.is_relative_to(EMBEDDED):
        with tempfile.TemporaryDirectory() as restored:
            restore_draft(graph, Path(restored))
            yield Path(restored)
    else:
        raise UsageError(
            f"no {directory}/config.json: run `make pair-bank` first, which builds the bank's pairs"
        )
