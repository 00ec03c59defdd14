"""`lib.hf`: `model.generate(custom_generate=outrider.hf.generate)` beside `edge-client run`, token for token.

The model is the embedded draft in float32, loaded by transformers; `edge-client run`, in a process of its own, drafts
with the exported one. Texts are greedy and sampled in turn, and speculative in both.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import outrider
from benchmarks.quantised.source import draft_source
from benchmarks.results_file import Found
from outrider.common.process.quiet_loading import quiet_loading
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.processes import run_edge, running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_least, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW = 20, 64
TEMPERATURES = (0.0, 0.8)
MODE = "speculative"


def run(num_prompts: int = NUM_PROMPTS) -> Found:
    """Returns how many of the texts are the same, and how their tokens came about."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    origins: Counter[str] = Counter()
    different = []
    with running_verifier("--log-level", "error") as verifier, draft_source() as source:
        with quiet_loading(hf_logging):
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for seed, prompt in enumerate(load_prompts(limit=num_prompts)):
            temperature = TEMPERATURES[seed % len(TEMPERATURES)]
            ids = tokenizer.encode(prompt.text)
            found = _generate(model, ids, verifier.address, temperature, seed, origins)
            if found != _run(prompt.text, verifier.address, temperature, seed):
                different.append(seed)
    num_tokens = sum(origins.values())
    what = (
        f"texts of custom_generate that are edge-client run's, token for token, of {num_prompts}, {NUM_NEW} tokens, "
        f"temperatures {' and '.join(map(str, TEMPERATURES))}"
    )
    return [judged("lib.hf", what, num_prompts - len(different), "texts", at_least(num_prompts))], {
        "different": different,
        "origins": dict(origins),
        "accepted_share_of_tokens": round(origins["accepted"] / num_tokens, 3),
    }


def _generate(
    model: Any, ids: list[int], address: str, temperature: float, seed: int, origins: Counter[str]
) -> list[int]:
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=NUM_NEW,
        custom_generate=outrider.hf.generate,
        verifier=address,
        seed=seed,
        settings={"mode": MODE},
        on_token=lambda event: origins.update([str(event.origin)]),
        **sampled,
    )
    return out[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def _run(prompt: str, address: str, temperature: float, seed: int) -> list[int]:
    flags = {"verifier": address, "temperature": temperature, "seed": seed, "mode": MODE}
    flags |= {"max-new-tokens": NUM_NEW, "on-timeout": "wait"}
    done = run_edge(["run", prompt, "--json", *(f"--{name}={value}" for name, value in flags.items())])
    done.check_returncode()
    return json.loads(done.stdout)["token_ids"]  # type: ignore[no-any-return]
