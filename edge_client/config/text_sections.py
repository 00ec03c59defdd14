"""Sections of the configuration about the text: sampling, where it ends, and the verification method."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.common.config.loader import option
from outrider.common.methods import DEFAULT_SUPPORT_SIZE, MAX_SUPPORT_SIZE
from outrider.common.types import Method


def _names(is_exact: bool) -> str:
    return ", ".join(method for method in Method if method.is_exact is is_exact)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Configures sampling, the seed apart."""

    temperature: float = option(0.8, "0 is greedy", metavar="T")
    top_k: int = option(0, "sample from the K most probable tokens; 0 is off", metavar="K")
    top_p: float = option(1.0, "sample from the smallest set with this probability; 1 is off", metavar="P")
    min_p: float = option(0.0, "leave out tokens below this share of the highest probability", metavar="P")
    repetition_penalty: float = option(1.0, "divides scores of tokens seen before; 1 is off", metavar="R")
    presence_penalty: float = option(0.0, "subtracted once from scores of generated tokens", metavar="P")
    frequency_penalty: float = option(
        0.0, "subtracted from a generated token's score for each time it occurred", metavar="P"
    )
    logit_bias: tuple[str, ...] = option(
        (), "add B to the score of token ID; may be repeated, or a list with commas", metavar="ID:B"
    )
    bad_word: tuple[str, ...] = option((), "word that is never generated; may be repeated", metavar="TEXT")


@dataclass(frozen=True, slots=True)
class StopConfig:
    """Configures where generation ends, `max_new_tokens` apart."""

    min_new_tokens: int = option(0, "fewest tokens to generate before an end of text", metavar="N", minimum=0)
    strings: tuple[str, ...] = option((), "text to stop before; may be repeated", metavar="TEXT", key="stop")
    token_ids: tuple[int, ...] = option(
        (), "token to stop after; may be repeated", metavar="ID", key="stop_token_id"
    )
    ignore_eos: bool = option(False, "continue after the model's end of text")


@dataclass(frozen=True, slots=True)
class VerificationConfig:
    """Configures the verification method."""

    method: Method = option(
        Method.COUPLED,
        f"verification method. Exact, so that the text has the target's distribution: "
        f"{_names(is_exact=True)}. Approximate: {_names(is_exact=False)}",
    )
    support_size: int | None = option(
        None,
        "sparse and block: most probable ids that a drafted token is sampled from and sent with; none is "
        f"{DEFAULT_SUPPORT_SIZE}",
        metavar="N",
        minimum=1,
        maximum=MAX_SUPPORT_SIZE,
    )
    num_candidates: int | None = option(
        None,
        "candidates: target samples in a verdict that rejects; none is the verifier's choice, 4",
        metavar="N",
        minimum=1,
        maximum=64,
    )
    threshold_pass: float | None = option(
        None,
        "threshold: accept tokens with at least this target probability; none is the verifier's, 0.3",
        metavar="P",
        minimum=1e-6,
        maximum=1.0,
    )
    threshold_ratio: float | None = option(
        None,
        "threshold: accept tokens with at least this ratio of target to draft probability; none is the "
        "verifier's, 0.5",
        metavar="R",
        minimum=1e-6,
        maximum=1e6,
    )
    typical_epsilon: float | None = option(
        None,
        "typical: accept tokens above this target probability; none is the verifier's, 0.09",
        metavar="P",
        minimum=1e-6,
        maximum=1.0,
    )
    typical_delta: float | None = option(
        None,
        "typical: or above D times exp(-entropy of the target); none is the verifier's, 0.3",
        metavar="D",
        minimum=1e-6,
        maximum=1.0,
    )
