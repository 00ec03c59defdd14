"""What the target's forwards cost, and how they compare with transformers' own: one process, no network.

`python -m benchmarks.pair.target [--target DIR] [--threads 1,2]` prints JSON. What is compared is timed
alternately in one loop; a ratio is the median of the rounds' own ratios, and comes with the A/A ratio of our
loop against itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.models import EMBEDDED

EMBEDDED_TARGET = EMBEDDED / "target"
DTYPES = ("float32", "bfloat16")
ROW_COUNTS = (1, 5, 9)
PROMPT_TOKENS = 128
NEW_TOKENS = 64


def measure_target(
    target: Path = EMBEDDED_TARGET,
    *,
    num_threads: int = 0,
    num_rounds: int = 7,
    dtypes: Sequence[str] = DTYPES,
) -> dict[str, Any]:
    """Time the target on a CPU.

    Returns, per dtype: `forward_ms` (rows fed and scored → median ms after a prompt of `PROMPT_TOKENS`),
    `forward_ratio` (the same : one row), `decode_ms` (per token of a bare greedy loop: ours, ours_again,
    generate, raw = transformers' forward with a DynamicCache) and `ratio` (tokens/s of ours : generate,
    ours : raw, ours : ours_again).
    """
    import torch

    before = torch.get_num_threads()
    if num_threads:
        torch.set_num_threads(num_threads)
    try:
        report: dict[str, Any] = {"num_threads": torch.get_num_threads(), "prompt_tokens": PROMPT_TOKENS}
        for dtype in dtypes:
            report[dtype] = _measure_dtype(target, dtype, num_rounds)
        return report
    finally:
        torch.set_num_threads(before)


def _measure_dtype(target: Path, dtype: str, num_rounds: int) -> dict[str, Any]:
    from outrider.cloud_verifier.backends.loading import load_target

    backend = load_target(target, dtype=dtype)
    model = _load_transformers(target, dtype)
    prompt = [(97 * i + 13) % backend.num_tokens for i in range(PROMPT_TOKENS)]
    loops: dict[str, Callable[[], float]] = {
        "ours": lambda: _decode_ours(backend, prompt),
        "generate": lambda: _decode_generate(model, prompt),
        "raw": lambda: _decode_raw(model, prompt),
        "ours_again": lambda: _decode_ours(backend, prompt),
    }
    rounds = _alternate(loops, num_rounds)
    forwards = _alternate(
        {str(n): lambda n=n: _forward_s(backend, prompt, n) for n in ROW_COUNTS},  # type: ignore[misc]
        3 * num_rounds,
    )
    return {
        "decoder": type(backend.decoder).__name__,
        "forward_ms": {name: _ms(seconds) for name, seconds in forwards.items()},
        "forward_ratio": {name: _ratio(seconds, forwards["1"]) for name, seconds in forwards.items()},
        "decode_ms": {name: _ms(seconds) for name, seconds in rounds.items()},
        "ratio": {name: _ratio(rounds[name], rounds["ours"]) for name in ("generate", "raw", "ours_again")},
    }


def _alternate(timed: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other in every round; one round is for warming up."""
    for run in timed.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(num_rounds):
        for name, run in timed.items():
            seconds[name].append(run())
    return seconds


def _load_transformers(target: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from outrider.cloud_verifier.backends.loading import quiet_transformers

    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            target, dtype=getattr(torch, dtype), local_files_only=True
        ).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _decode_ours(backend: TargetBackend, prompt: list[int]) -> float:
    """Seconds a token of a bare greedy loop, the prompt's forward excluded."""
    sequence = backend.new_sequence()
    logits = backend.forward([ForwardItem(sequence, prompt, 1)])
    begin = time.perf_counter()
    for _ in range(NEW_TOKENS):
        logits = backend.forward([ForwardItem(sequence, [int(logits[0].argmax())], 1)])
    seconds = (time.perf_counter() - begin) / NEW_TOKENS
    backend.close(sequence)
    return seconds


def _decode_generate(model: Any, prompt: list[int]) -> float:
    """Seconds a token of `generate`, less a `generate` of one token (the prompt's forward and its set-up)."""
    import torch

    ids = torch.tensor([prompt])

    def run(num_tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
        )
        return time.perf_counter() - begin

    first = run(1)
    return (run(NEW_TOKENS + 1) - first) / NEW_TOKENS


def _decode_raw(model: Any, prompt: list[int]) -> float:
    """Seconds a token of transformers' forward with its cache, without `generate` around it."""
    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        output = model(torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        begin = time.perf_counter()
        for _ in range(NEW_TOKENS):
            token = int(output.logits[0, -1].argmax())
            output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    return (time.perf_counter() - begin) / NEW_TOKENS


def _forward_s(backend: TargetBackend, prompt: list[int], num_rows: int) -> float:
    """Median seconds of a forward that feeds and scores `num_rows` tokens after the prompt."""
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, prompt, 0)])
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        backend.forward([ForwardItem(sequence, prompt[:num_rows], num_rows)])
        seconds.append(time.perf_counter() - begin)
        backend.truncate(sequence, len(prompt))
    backend.close(sequence)
    return statistics.median(seconds)


def _ms(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)


def _ratio(numerators: list[float], denominators: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(numerators, denominators, strict=True)), 3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pair.target", description=__doc__)
    parser.add_argument("--target", type=Path, default=EMBEDDED_TARGET, metavar="DIR")
    parser.add_argument("--threads", default=f"1,{os.cpu_count()}", help="thread counts, comma-separated")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    arguments = parser.parse_args()
    reports = [
        measure_target(
            arguments.target,
            num_threads=int(count),
            num_rounds=arguments.rounds,
            dtypes=arguments.dtypes.split(","),
        )
        for count in dict.fromkeys(arguments.threads.split(","))
    ]
    print(json.dumps(reports, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
