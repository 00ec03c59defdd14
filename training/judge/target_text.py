"""Texts that a target writes with the noise that an edge shares, for judging drafts against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.common.sampling.processors import choose, process_logits
from outrider.common.types import SamplingParams, TokenIds

_TOGETHER = 16  # texts in one forward: twice the time of one on a CPU


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
    every = list(zip(list(prompts) * num_seeds, samplings, strict=True))
    yield from texts_after(backend, every, num_new)


def texts_after(
    backend: TargetBackend, asked: Sequence[tuple[TokenIds, SamplingParams]], num_new: int
) -> Iterator[WrittenText]:
    """Yields the target's texts after prompts, each with its own parameters, up to its end-of-text token."""
    for start in range(0, len(asked), _TOGETHER):
        yield from _write(backend, asked[start : start + _TOGETHER], num_new)


def _write(
    backend: TargetBackend, asked: Sequence[tuple[TokenIds, SamplingParams]], num_new: int
) -> Iterator[WrittenText]:
    sequences = [backend.new_sequence() for _ in asked]
    new: list[list[int]] = [[] for _ in asked]
    fed = [prompt for prompt, _ in asked]
    while live := [
        index
        for index, ids in enumerate(new)
        if len(ids) < num_new and not (ids and ids[-1] in backend.eos_token_ids)
    ]:
        items = [ForwardItem(sequences[index], fed[index], 1) for index in live]
        logits = np.asarray(backend.forward(items))[:, : backend.num_tokens]
        for index, row in zip(live, logits, strict=True):
            prompt, sampling = asked[index]
            scores = process_logits(np, row[None], sampling, prompt_ids=prompt, output_ids=new[index])
            (token_id,) = choose(scores, sampling, [len(prompt) + len(new[index])]).tolist()
            new[index].append(token_id)
            fed[index] = (token_id,)
    for sequence in sequences:
        backend.close(sequence)
    return (
        WrittenText(prompt, tuple(ids), sampling) for (prompt, sampling), ids in zip(asked, new, strict=True)
    )
