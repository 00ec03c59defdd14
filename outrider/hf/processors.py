"""Reads the logits processors that transformers made of a generation config, or was given, as settings of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers.generation import logits_process as of_transformers

from outrider.common.errors import UsageError

Read = dict[str, Any]


def read_processors(processors: Sequence[Any], num_padding: int, num_prompt: int) -> Read:
    """Returns settings by key, and under `bad_words` the ids that bad words have.

    The processors are what transformers would apply, whichever way they were asked for. Raises `UsageError` for one
    that the verifier, which samples the text, does not have, by the field of the generation config or its class.
    """
    read: Read = {}
    for each in processors:
        name = type(each).__name__
        reader = _READERS.get(type(each))
        if reader is None:
            field = _FIELDS.get(name)
            raise UsageError(
                f"{field} ({name})" if field else f"logits_processor: {name}",
                "the verifier samples the text, and has no such step; leave it out",
            )
        if name == "RepetitionPenaltyLogitsProcessor":
            _check_penalty(each, num_padding)
        found = reader(each)
        if "min_length" in found:
            found = {"min_new_tokens": max(0, found["min_length"] - num_prompt)}
        if twice := {key for key in found if read.get(key, found[key]) != found[key]}:
            raise UsageError(f"logits_processor: {name}", f"{min(twice)} is given twice, with two values")
        read |= found
    return read


def _check_penalty(processor: Any, num_padding: int) -> None:
    """Only padding, which is no part of the prompt here, may be left out of the penalty."""
    ignored = processor.prompt_ignore_length
    num_ignored = 0 if ignored is None else int(ignored)
    if num_ignored not in (0, num_padding):
        raise UsageError(
            f"logits_processor: RepetitionPenaltyLogitsProcessor with prompt_ignore_length={num_ignored}",
            "the verifier's penalty sees the whole prompt",
        )


def _read_bias(processor: Any) -> Read:
    biases = processor.sequence_bias
    if longer := next((each for each in biases if len(each) != 1), None):
        raise UsageError(
            f"sequence_bias: {list(longer)} has {len(longer)} tokens",
            "the verifier has biases of single tokens",
        )
    return {"logit_bias": [f"{ids[0]}:{bias!r}" for ids, bias in biases.items()]}


def _read_bad_words(processor: Any) -> Read:
    return {"bad_words": tuple(tuple(map(int, each)) for each in processor.sequence_bias)}


def _nothing(processor: Any) -> Read:
    """It changes no choice: what it subtracts from all scores is the same."""
    return {}


_READERS: dict[type, Callable[[Any], Read]] = {
    of_transformers.TemperatureLogitsWarper: lambda each: {"temperature": each.temperature},
    of_transformers.TopKLogitsWarper: lambda each: {"top_k": each.top_k},
    of_transformers.TopPLogitsWarper: lambda each: {"top_p": each.top_p},
    of_transformers.MinPLogitsWarper: lambda each: {"min_p": each.min_p},
    of_transformers.RepetitionPenaltyLogitsProcessor: lambda each: {"repetition_penalty": each.penalty},
    of_transformers.MinLengthLogitsProcessor: lambda each: {"min_length": each.min_length},
    of_transformers.MinNewTokensLengthLogitsProcessor: lambda each: {"min_new_tokens": each.min_new_tokens},
    of_transformers.NoBadWordsLogitsProcessor: _read_bad_words,
    of_transformers.SequenceBiasLogitsProcessor: _read_bias,
    of_transformers.LogitNormalization: _nothing,
}
_FIELDS = {  # of the generation config, by the processor that comes of it
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
