"""`quant.nf4`: NF4 targets, the embedded one and a random one of 0.3 B parameters: texts, memory, held-out text."""

from __future__ import annotations

import math
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.engine_texts import write_texts
from benchmarks.reliability.exact_rows import make_prompts
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.quantised import four_bit
from outrider.cloud_verifier.backends.through_transformers import TransformersDecoder
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.results import at_most, judged
from outrider.models import EMBEDDED
from outrider.training.data.corpus import read_held_out

# Embedding and head are a fifth of it, as in published models of this size.
RANDOM = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 22,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
NUM_TEXTS = {"embedded": 60, "0.3B": 8}
NUM_NEW = 32
NUM_TOGETHER = 4
WINDOW, FILE_TOKENS = 512, 1024  # of held-out files
STEP_ROWS, NUM_STEPS = 5, 30


def run() -> Found:
    """Returns the measures of both shapes."""
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in _shapes(Path(scratch)):
            details[name] = _measure(directory, NUM_TEXTS[name])
    quality = _quality(EMBEDDED / "target")
    num_texts = 2 * sum(NUM_TEXTS.values())
    unlike = sum(sum(each["unlike"].values()) for each in details.values())
    what = f"texts of NF4 targets unlike their own cloud-only, of {num_texts}, half of them {NUM_TOGETHER} at once"
    measures = [judged("quant.nf4.text", what, unlike, "texts", at_most(0))]
    for part, target in (("layers", 0.16), ("whole", 0.35)):
        values = {name: each[part] for name, each in details.items()}
        each = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        of = "the layers'" if part == "layers" else "all, embedding and head in bfloat16,"
        measures.append(
            judged(
                f"quant.nf4.{part}",
                f"memory of weights, {of} NF4 : float32, the larger of {each}",
                max(values.values()),
                "ratio",
                at_most(target),
            )
        )
    ratio = quality["nf4"] / quality["float32"]
    what = f"bits per byte of {quality['num_files']} held-out files, {quality['num_tokens']} tokens, NF4 : float32"
    measures.append(judged("quant.nf4_quality", what, ratio, "ratio", at_most(1.05)))
    return measures, {**details, "held_out": quality}


def _shapes(scratch: Path) -> Iterator[tuple[str, Path]]:
    yield "embedded", EMBEDDED / "target"
    yield "0.3B", _write_random(scratch / "random")


def _write_random(directory: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **RANDOM)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    shutil.copy(EMBEDDED / "target" / "tokenizer.json", directory)
    return directory


def _load(directory: Path, **options: Any) -> PagedBackend:
    return load_target(directory, kv_tokens=2048, num_threads=1, **options)


def _measure(directory: Path, num_texts: int) -> dict[str, Any]:
    begin_s = time.monotonic()
    backend = _load(directory, quantize="nf4", exact_rows="on")
    load_s = time.monotonic() - begin_s
    prompts, samplings = make_prompts(num_texts)
    expected = write_texts(backend, prompts, samplings, NUM_NEW)
    unlike = {}
    for how, num_together in (("alone", 1), ("together", NUM_TOGETHER)):
        texts = write_texts(
            backend, prompts, samplings, NUM_NEW, expected=expected, num_together=num_together
        )
        unlike[how] = sum(map(list.__ne__, texts, expected))
    decoder = backend.decoder
    assert isinstance(decoder, TransformersDecoder) and backend.row_plan is not None
    num_weights, num_in_layers = _num_weights(backend)
    layers = sum(four_bit.num_bytes(each) for each in decoder.model.model.layers)
    plain = _load(directory, dtype="bfloat16")
    return {
        "num_weights": num_weights,
        "weight_bytes": backend.num_weight_bytes,
        "unlike": unlike,
        "layers": layers / (4 * num_in_layers),
        "whole": backend.num_weight_bytes / (4 * num_weights),
        "row_counts": backend.row_plan.counts,
        "load_s": round(load_s, 1),
        "step_nf4_to_bfloat16": _step_ratio(backend, plain),
    }


def _num_weights(backend: PagedBackend) -> tuple[int, int]:
    """Returns the numbers of a target's weights, and of its layers'."""
    decoder = backend.decoder
    assert isinstance(decoder, TransformersDecoder)

    def count(module: Any) -> int:
        own = {id(each): each.numel() for each in module.parameters()}
        for each in module.modules():
            if four_bit.quant_state(each) is not None:
                own[id(each.weight)] = each.in_features * each.out_features
        return sum(own.values())

    return count(decoder.model), sum(map(count, decoder.model.model.layers))


def _step_ratio(first: PagedBackend, second: PagedBackend) -> dict[str, float]:
    """Returns the ratio of the medians of alternating steps, and that of one with itself."""
    backends = {"first": first, "second": second, "again": second}
    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(NUM_STEPS):
        for name, backend in backends.items():
            sequence = backend.new_sequence()
            begin_s = time.perf_counter()
            backend.forward([ForwardItem(sequence, list(range(7, 7 + STEP_ROWS)), STEP_ROWS)])
            times[name].append(time.perf_counter() - begin_s)
            backend.close(sequence)
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratios = {name: round(medians[name] / medians["second"], 2) for name in ("first", "again")}
    return {"ratio": ratios["first"], "a_a": ratios["again"]}


def _quality(directory: Path) -> dict[str, Any]:
    """Returns bits per byte on the held-out files that this machine has."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    paths = sysconfig.get_paths()
    files = read_held_out(Path(paths["stdlib"]), Path(paths["purelib"]))
    texts = [tokenizer.encode(text) for text in files.values()]
    num_bytes = [len(text.encode()) / len(ids) for text, ids in zip(files.values(), texts, strict=True)]
    windows = [
        ([0, *ids[start : start + WINDOW]], a_token)  # after the separator, as in training
        for ids, a_token in zip(texts, num_bytes, strict=True)
        for start in range(0, min(len(ids), FILE_TOKENS), WINDOW)
    ]
    num_tokens = sum(len(window) - 1 for window, _ in windows)
    bits = math.log(2) * sum((len(window) - 1) * a_token for window, a_token in windows)
    found: dict[str, Any] = {"num_files": len(files), "num_tokens": num_tokens}
    for name, options in {"float32": {"dtype": "float32"}, "nf4": {"quantize": "nf4"}}.items():
        backend = _load(directory, **options)
        found[name] = sum(_nats(_score(backend, window), window[1:]) for window, _ in windows) / bits
    return found


def _score(backend: PagedBackend, window: list[int]) -> Logits:
    sequence = backend.new_sequence()
    rows = backend.forward([ForwardItem(sequence, window[:-1], len(window) - 1)]).copy()
    backend.close(sequence)
    return rows


def _nats(logits: Logits, targets: list[int]) -> float:
    wide = logits.astype(np.float64)
    most = wide.max(axis=1, keepdims=True)
    sums = most[:, 0] + np.log(np.exp(wide - most).sum(axis=1))
    return float((sums - wide[np.arange(len(targets)), targets]).sum())
