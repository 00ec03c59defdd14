"""How often the target's token is among k children: by draft score plus shared noise, by the draft's probability
alone (Medusa, EAGLE), and by rejection sampling without replacement (Sequoia)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.cloud_verifier.backends.base import ForwardItem, TargetBackend
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.training.judge.target_text import WrittenText

MOST_CHILDREN = 4
Probs = NDArray[np.float64]


def coverages(
    backend: TargetBackend, model: OnnxDraftModel, texts: Sequence[WrittenText]
) -> dict[str, list[float]]:
    """Returns, by way, the share of positions at which the target's token is among 1 to 4 children."""
    found: dict[str, list[list[bool]]] = {"noise": [], "blind": [], "rejection": []}
    rng = np.random.default_rng(0)
    for text in texts:
        target = _target_probs(backend, text)
        sequence = model.sequence(text.sampling, num_prompt_tokens=len(text.prompt))
        sequence.commit(text.prompt)
        for token_id, p in zip(text.new, target, strict=True):
            rows = sequence.feed_root()
            told = sequence.tell(rows, ()).token_ids
            q = rows.tempered_probs[0].astype(np.float64)
            found["noise"].append([token_id in told[:k] for k in _counts()])
            best = np.argsort(-q)[:MOST_CHILDREN].tolist()
            found["blind"].append([token_id in best[:k] for k in _counts()])
            tries = rejections(p, q / q.sum(), rng)
            found["rejection"].append([tries <= k for k in _counts()])
            sequence.commit([token_id])
        sequence.close()
    return {name: np.mean(hits, axis=0).tolist() for name, hits in found.items()}


def rejections(p: Probs, q: Probs, rng: np.random.Generator) -> int:
    """Returns which child, drawn from q without replacement, rejection sampling accepts; `MOST_CHILDREN` + 1
    where it is none of them."""
    p, q = p.copy(), q.copy()
    for number in _counts():
        total = q.sum()
        if total <= 0:
            break
        q /= total
        child = int(rng.choice(q.size, p=q))
        if rng.random() < min(1.0, p[child] / q[child]):
            return number
        p = np.maximum(p - q, 0.0)
        p /= p.sum()
        q[child] = 0.0
    return MOST_CHILDREN + 1


def _counts() -> range:
    return range(1, MOST_CHILDREN + 1)


def _target_probs(backend: TargetBackend, text: WrittenText) -> Probs:
    """Returns [new tokens, vocab]: the distribution of each, at the text's temperature."""
    sequence = backend.new_sequence()
    fed = (*text.prompt, *text.new[:-1])
    logits = np.asarray(backend.forward([ForwardItem(sequence, fed, len(text.new))]), np.float64)
    scores = logits[:, : backend.num_tokens] / text.sampling.temperature
    backend.close(sequence)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    probs: Probs = weights / weights.sum(axis=1, keepdims=True)
    return probs
