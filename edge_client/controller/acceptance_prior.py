"""How much of a draft stood in the texts before this one, as the next one's first belief. Thread-safe.

A session that knows nothing decides its first tokens by luck. One behind others of the same draft, target and
kind of temperature begins with the mean of what was believed at their ends, each text counting
once however long it was: so it is narrow where texts are alike and wide where they are not. What is believed
of any draft stays in it as one text, and the last ones count most: a text unlike all before is soon seen to
be. This is predictive recursion (Newton 2002) with a floor under its weights. A link or a busy verifier
changes nothing in it: what stands does not depend on them. It is of `coupled` alone, where a token that the
draft would have said of a stream is one that would have stood; with other methods it need not be, and a
session that streamed would teach the next one to stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.edge_client.controller.acceptance_posterior import usual_belief

MOST_TEXTS = 9  # that count beside what is usual


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the acceptance of one draft depends on, beside the text."""

    target_fingerprint: str
    temperature: int  # to the nearest half, in halves: what is drawn at 0.7 stands about as at 0.8

    @classmethod
    def of(cls, target_fingerprint: str, temperature: float) -> Circumstances:
        return cls(target_fingerprint, round(2 * temperature))


@dataclass(slots=True)
class _Texts:
    num: int
    mean: list[float]  # of their beliefs


class Experience:
    """Of one draft. Beliefs are probabilities of each of `beliefs.ALPHAS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._texts: dict[Circumstances, _Texts] = {}

    def belief(self, circumstances: Circumstances) -> list[float]:
        """Of a text that is about to begin."""
        usual = usual_belief()
        with self._lock:
            texts = self._texts.get(circumstances)
            if texts is None:
                return list(usual)
            return [(u + texts.num * m) / (1 + texts.num) for u, m in zip(usual, texts.mean, strict=True)]

    def learn(self, circumstances: Circumstances, belief: Sequence[float]) -> None:
        """`belief` of a text that ended, some of whose tokens were judged."""
        with self._lock:
            texts = self._texts.setdefault(circumstances, _Texts(0, [0.0] * len(belief)))
            texts.num = min(texts.num + 1, MOST_TEXTS)
            texts.mean = [m + (b - m) / texts.num for m, b in zip(texts.mean, belief, strict=True)]
