"""Computes thresholds as percentiles of signals, how many tokens they call hard, and how well signals tell tokens that
the target rejects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.common.sequences import common_prefix
from outrider.common.types import SamplingParams, Signals
from outrider.edge_client.drafting.base import DraftModel
from outrider.edge_client.gate.thresholds import GateThresholds


@dataclass(frozen=True, slots=True)
class Sample:
    """Holds one drafted token's signals. `is_right` says whether the text has the token there; None after a
    token that it does not have."""

    signals: Signals
    is_right: bool | None


def draft_along(
    draft: DraftModel,
    sampling: SamplingParams,
    num_support: int,
    prompt_ids: Sequence[int],
    text_ids: Sequence[int],
    num_draft_tokens: int,
) -> Iterator[Sample]:
    """Yields samples of rounds of `num_draft_tokens` along a given text: each round accepts the tokens that
    are the text's, and the next begins after those and one more.

    Along a target's own text these are the drafts of a session with `coupled`, token for token.
    """
    sequence = draft.sequence(sampling, num_prompt_tokens=len(prompt_ids), num_support=num_support)
    try:
        sequence.commit(prompt_ids)
        done = 0
        while done < len(text_ids):
            drafted = sequence.propose(min(num_draft_tokens, len(text_ids) - done))
            if not drafted.token_ids:  # the draft's context is full
                return
            theirs = text_ids[done : done + len(drafted.token_ids)]
            num_right = common_prefix(drafted.token_ids, theirs)
            for index, signals in enumerate(drafted.signals):
                yield Sample(signals, index < num_right if index <= num_right else None)
            sequence.commit(text_ids[done : done + num_right + 1])
            done += num_right + 1
    finally:
        sequence.close()


def thresholds_at(signals: Sequence[Signals], percentile: float) -> GateThresholds:
    """Returns the percentile of NLL, entropy and, where every sample has it, variance. The margin is small
    where a draft is unsure, so its threshold is the percentile from the other end."""
    assert signals, "thresholds of nothing"
    variances = [each.variance for each in signals if each.variance is not None]
    return GateThresholds(
        nll=_at([each.nll for each in signals], percentile),
        entropy=_at([each.entropy_bits for each in signals], percentile),
        margin=_at([each.margin for each in signals], 100 - percentile),
        variance=_at(variances, percentile) if len(variances) == len(signals) else None,
    )


@dataclass(frozen=True, slots=True)
class Sorting:
    """Holds how thresholds sort the drafted tokens. `right_of_*` compare with the target's own text, and are
    None where there is none."""

    hard_share: float  # that pass any threshold
    hard_share_of: dict[str, float]  # by signal
    right_of_easy: float | None  # of those that pass none, how many the target has too
    right_of_hard: float | None
    auc_of: dict[
        str, float
    ]  # by signal, of telling tokens that the target rejects; empty where it has no say


def sort_samples(samples: Sequence[Sample], thresholds: GateThresholds, is_target: bool) -> Sorting:
    """Returns which share of the samples is hard, by any threshold and by each, and how often the target
    agrees."""
    hard = _are_hard(samples, thresholds)
    judged = [
        (is_hard, sample.is_right)
        for is_hard, sample in zip(hard, samples, strict=True)
        if is_target and sample.is_right is not None
    ]
    right = [each.signals for each in samples if is_target and each.is_right is True]
    wrong = [each.signals for each in samples if is_target and each.is_right is False]
    return Sorting(
        hard_share=sum(hard) / len(hard),
        hard_share_of={
            name: sum(_are_hard(samples, GateThresholds(**{name: value}))) / len(samples)
            for name, value in by_name(thresholds).items()
        },
        right_of_easy=_share([is_right for is_hard, is_right in judged if not is_hard]),
        right_of_hard=_share([is_right for is_hard, is_right in judged if is_hard]),
        auc_of={name: auc(*(_unsure(name, each) for each in (wrong, right))) for name in thresholds.names}
        if right and wrong
        else {},
    )


def auc(wrong: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """Returns the chance that a value of `wrong` is above one of `right`, equal ones counting half: the area under the
    ROC curve. 1 separates them, 0.5 tells nothing. Each is [n]."""
    order = np.sort(right)
    below, not_above = np.searchsorted(order, wrong, "left"), np.searchsorted(order, wrong, "right")
    return float((below + not_above).mean() / 2 / len(right))


def _unsure(name: str, signals: Sequence[Signals]) -> NDArray[np.float64]:
    """Returns a signal's values, turned round where a small one is that of an unsure draft."""
    field = "entropy_bits" if name == "entropy" else name
    values = np.array([getattr(each, field) for each in signals], np.float64)
    return -values if name == "margin" else values


def by_name(thresholds: GateThresholds) -> dict[str, float]:
    """Returns the thresholds that are set, by signal."""
    return {name: getattr(thresholds, name) for name in thresholds.names}


def _are_hard(samples: Sequence[Sample], thresholds: GateThresholds) -> list[bool]:
    return [thresholds.is_hard(sample.signals) for sample in samples]


def _at(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile))


def _share(truths: Sequence[bool]) -> float | None:
    return sum(truths) / len(truths) if truths else None
