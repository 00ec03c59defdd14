"""A draft's signals: the edge's way and the GPU's give the reference's numbers."""

import numpy as np
import pytest

from outrider.kernels import reference
from outrider.kernels.signals import draft_signals


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return (weights / weights.sum()).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [2, 5, 300, 8192])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 30.0])
def test_the_edges_signals_are_the_references(vocab_size, scale):
    rng = np.random.default_rng(vocab_size)
    for _ in range(20):
        logits = (rng.normal(size=vocab_size) * scale).astype(np.float32)
        probs, token_id = softmax(logits), int(rng.integers(vocab_size))
        before = probs.copy()
        expected = reference.draft_signals(logits, token_id)
        got = draft_signals(logits, probs, token_id, int(probs.argmax()))
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-4)
        assert (probs == before).all()


def test_signals_of_distributions_known_by_heart():
    even, sure = np.zeros(4, np.float32), np.array([0, 200, 0], np.float32)
    np.testing.assert_allclose(reference.draft_signals(even, 2), (2.0, np.log(4), 0.0), atol=1e-12)
    np.testing.assert_allclose(reference.draft_signals(sure, 0), (0.0, 200.0, 1.0), atol=1e-12)
