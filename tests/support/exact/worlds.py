"""Pairs of target and draft over six tokens: random ones, and those that break methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

import numpy as np
from support.exact.branching import Text, World

from outrider.common.types import Support

VOCAB = 6
TOTAL_WEIGHT = 2**14

Pair = tuple[list[float], list[int]]  # p, and the weights of q
Maker = Callable[[np.random.Generator], Pair]


def _dirichlet(rng: np.random.Generator, concentration: float = 0.6) -> list[float]:
    return [float(x) for x in rng.dirichlet([concentration] * VOCAB)]


def _weights(probs: list[float]) -> list[int]:
    weights = [round(p * TOTAL_WEIGHT) for p in probs]
    return weights if any(weights) else [1] + [0] * (VOCAB - 1)


def _random(rng: np.random.Generator) -> Pair:
    return _dirichlet(rng), _weights(_dirichlet(rng))


def _alike(rng: np.random.Generator) -> Pair:
    """What a good draft is: q near p."""
    p = np.array(_dirichlet(rng))
    return p.tolist(), _weights((0.8 * p + 0.2 * np.array(_dirichlet(rng))).tolist())


def _same(rng: np.random.Generator) -> Pair:
    weights = _weights(_dirichlet(rng))
    return [weight / sum(weights) for weight in weights], weights


def _disjoint(rng: np.random.Generator) -> Pair:
    order = rng.permutation(VOCAB)
    p, q = np.zeros(VOCAB), np.zeros(VOCAB)
    p[order[:3]], q[order[3:]] = rng.dirichlet([1.0] * 3), rng.dirichlet([1.0] * 3)
    return p.tolist(), _weights(q.tolist())


def _near_zero(rng: np.random.Generator) -> Pair:
    """p of 1e-12 where q is large, and q of one part in 16 thousand where p is large."""
    order = rng.permutation(VOCAB)
    p, weights = np.full(VOCAB, 1e-12), np.ones(VOCAB, int)
    p[order[0]], p[order[1]] = 0.7, 0.3
    weights[order[2]], weights[order[3]] = 9000, 7000
    return (p / p.sum()).tolist(), weights.tolist()


def _one_hot(rng: np.random.Generator) -> Pair:
    """p certain of one token; q certain of it, certain of another, or unsure."""
    p = np.eye(VOCAB)[rng.integers(VOCAB)].tolist()
    kind = rng.integers(3)
    q = p if kind == 0 else np.eye(VOCAB)[rng.integers(VOCAB)].tolist() if kind == 1 else _dirichlet(rng)
    return p, _weights(q)


def _mismatch(rng: np.random.Generator) -> Pair:
    p = sorted(_dirichlet(rng, 0.3))
    return p, _weights(p[::-1])


def _truncated(rng: np.random.Generator) -> Pair:
    """q is the two or three likeliest of its own ids."""
    q = np.array(_dirichlet(rng))
    q[np.argsort(-q)[int(rng.integers(2, 4)) :]] = 0
    return _dirichlet(rng), _weights((q / q.sum()).tolist())


def _deterministic(rng: np.random.Generator) -> Pair:
    """Prompt lookup, a greedy draft: q = 1."""
    weights = [0] * VOCAB
    weights[int(rng.integers(VOCAB))] = 1
    return _dirichlet(rng), weights


def _mixed(rng: np.random.Generator) -> Pair:
    """Another kind after every text."""
    return list(KINDS.values())[int(rng.integers(len(KINDS) - 1))](rng)


KINDS: dict[str, Maker] = {
    "random": _random,
    "alike": _alike,
    "same": _same,
    "disjoint": _disjoint,
    "near_zero": _near_zero,
    "one_hot": _one_hot,
    "mismatch": _mismatch,
    "truncated": _truncated,
    "deterministic": _deterministic,
    "mixed": _mixed,
}


def make_world(kind: str, seed: int = 0) -> World:
    """p and q depend on the whole text."""

    @cache
    def pair(text: Text) -> tuple[tuple[float, ...], Support]:
        digest = hashlib.blake2b(repr((kind, seed, text)).encode(), digest_size=8).digest()
        p, weights = KINDS[kind](np.random.default_rng(int.from_bytes(digest, "little")))
        ids = tuple(i for i in sorted(range(VOCAB), key=lambda i: (-weights[i], i)) if weights[i] > 0)
        return tuple(p), Support(ids, tuple(int(weights[i]) for i in ids))

    return World(target=lambda text: pair(text)[0], support=lambda text: pair(text)[1])
