"""Texts that a target writes with the noise that an edge shares, for judging drafts against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.types import SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Holds one text of the target, to its end or to the limit."""

    prompt: TokenIds
    new: TokenIds
    sampling: SamplingParams


def written_texts(
    backend: TargetBackend, prompts: Sequence[TokenIds], temperature: float, num_new: int, num_seeds: int = 1
) -> Iterator[WrittenText]:
    """Yields the target's texts after each prompt, each with a seed of its own, up to its end-of-text token."""
    samplings = [SamplingParams(temperature=temperature, seed=1 + i) for i in range(num_seeds * len(prompts))]
    texts = zip(list(prompts) * num_seeds, samplings, strict=True)
    for prompt, sampling in texts:
        yield _write(backend, prompt, sampling, num_new)


def _write(backend: TargetBackend, prompt: TokenIds, sampling: SamplingParams, num_new: int) -> WrittenText:
    sequence = backend.new_sequence()
    new: list[int] = []
    fed = prompt
    while len(new) < num_new and not (new and new[-1] in backend.eos_token_ids):
        logits = np.asarray(backend.forward([ForwardItem(sequence, fed, 1)]))[:, : backend.num_tokens]
        scores = process_logits(np, logits, sampling, prompt_ids=prompt, output_ids=new)
        (token_id,) = choose(scores, sampling, [len(prompt) + len(new)]).tolist()
        new.append(token_id)
        fed = (token_id,)
    backend.close(sequence)
    return WrittenText(prompt, tuple(new), sampling)
