"""Reads one call of `model.generate` as the settings of a call: each as asked, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import stopping_criteria as of_transformers

from outrider.common.errors import UsageError
from outrider.common.types import ModelInfo, TokenIds
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.hf.processors import read_processors

# Fields of the generation config without a processor: the value that asks for nothing, and why others are refused.
_ONE_TEXT = "a call writes one text, of samples of the target; make several calls with several seeds"
_NO_BEAMS = "the target samples its text, it has no beams"
_AT_TARGET = "the text is another model's, which does not send them"
_OWN_DRAFT = "the model drafts itself"
REFUSED: dict[str, tuple[object, str]] = {
    "num_beams": (1, _NO_BEAMS),
    "num_beam_groups": (1, _NO_BEAMS),
    "diversity_penalty": (0.0, _NO_BEAMS),
    "constraints": (None, _NO_BEAMS),
    "force_words_ids": (None, _NO_BEAMS),
    "num_return_sequences": (1, _ONE_TEXT),
    "penalty_alpha": (None, "the target samples its text, it has no contrastive search"),
    "dola_layers": (None, "the target samples from its last layer"),
    "use_mtp": (False, _OWN_DRAFT),
    "prompt_lookup_num_tokens": (None, _OWN_DRAFT),
    "assistant_early_exit": (None, _OWN_DRAFT),
    "token_healing": (False, "the verifier continues the prompt as it is"),
    "max_time": (None, "a text ends by its tokens; end it in on_token by an exception"),
    "output_scores": (False, _AT_TARGET),
    "output_logits": (False, _AT_TARGET),
    "output_attentions": (False, _AT_TARGET),
    "output_hidden_states": (False, _AT_TARGET),
}
_OF_LOCAL_LOOP = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"}
_LOCAL_CACHE = {"cache", "past_key_values"}  # transformers 5.24 renamed the second to the first


@dataclass(frozen=True, slots=True)
class Request:
    """Holds a prompt without its padding, settings of the call by key, and what depends on tokenizer and target."""

    prompt_ids: TokenIds
    sampling: Mapping[str, object]
    bad_words: tuple[TokenIds, ...]
    eos_token_ids: frozenset[int]  # exactly these end the text

    def settings(self, tokenizer: EdgeTokenizer, target: ModelInfo | None) -> dict[str, object]:
        """Returns all settings of the call. Raises `UsageError` where tokenizer or target cannot do what is asked."""
        theirs = frozenset(target.eos_token_ids) if target is not None else frozenset()
        is_theirs = target is not None and theirs <= self.eos_token_ids
        if self.sampling["min_new_tokens"] and self.eos_token_ids != theirs:
            raise UsageError(
                f"min_new_tokens with eos_token_id {sorted(self.eos_token_ids)}",
                f"the verifier holds back the target's own end-of-text ids, {sorted(theirs)}",
            )
        return {
            **self.sampling,
            "ignore_eos": not is_theirs,
            "stop_token_id": sorted(self.eos_token_ids - theirs if is_theirs else self.eos_token_ids),
            "bad_word": [_word(tokenizer, each) for each in self.bad_words],
        }


def read_request(
    input_ids: torch.Tensor,
    config: Any,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    stop_strings: str | Sequence[str],
    model_kwargs: Mapping[str, Any],
) -> Request:
    """Returns what a call asks. Raises `UsageError` naming what cannot be done."""
    for name, (neutral, reason) in REFUSED.items():
        if (value := getattr(config, name, None)) is not None and value != neutral:
            raise UsageError(f"{name}={value!r}", reason)
    _check_inputs(input_ids, model_kwargs)
    num_padding = _num_padding(input_ids, model_kwargs)
    length, eos_token_ids, strings = _read_criteria(criteria)
    num_prompt = input_ids.shape[1]
    read = read_processors(processors, num_padding, num_prompt)
    sampling = {
        "max_new_tokens": length - num_prompt,
        "temperature": read.get("temperature", 1.0) if config.do_sample else 0.0,
        "top_k": read.get("top_k", 0),
        "top_p": read.get("top_p", 1.0),
        "min_p": read.get("min_p", 0.0),
        "repetition_penalty": read.get("repetition_penalty", 1.0),
        "logit_bias": read.get("logit_bias", ()),
        "min_new_tokens": read.get("min_new_tokens", 0),
        "stop": [*([stop_strings] if isinstance(stop_strings, str) else stop_strings), *strings],
    }
    prompt_ids = tuple(input_ids[0, num_padding:].tolist())
    return Request(prompt_ids, sampling, read.get("bad_words", ()), eos_token_ids)


def _check_inputs(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        raise UsageError(f"input_ids: a batch of {input_ids.shape[0]} texts", "make one call for each text")
    for name, value in model_kwargs.items():
        if value is None or name in _OF_LOCAL_LOOP:
            continue
        if name not in _LOCAL_CACHE or getattr(value, "_is_user_defined", False):
            raise UsageError(f"{name}: the verifier has no use for it", "give input_ids and attention_mask")


def _num_padding(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> int:
    """Returns how many tokens before the prompt the attention mask hides; it may hide no others."""
    num_padding = 0
    if (mask := model_kwargs.get("attention_mask")) is not None:
        if mask.shape != input_ids.shape:
            theirs, ours = list(mask.shape), list(input_ids.shape)
            raise UsageError(
                f"attention_mask: has shape {theirs}", f"input_ids have {ours}; give one of that"
            )
        seen = (mask[0] != 0).tolist()
        num_padding = seen.index(True) if True in seen else len(seen)
        if not all(seen[num_padding:]):
            raise UsageError(
                "attention_mask: it hides tokens within the prompt",
                "the verifier reads whole prompts; only padding on the left may be hidden",
            )
    if (positions := model_kwargs.get("position_ids")) is not None:
        given = positions.flatten().tolist()[num_padding:]
        if given != list(range(len(given))):
            raise UsageError(
                "position_ids: they do not count from 0", "the verifier counts the prompt's tokens"
            )
    return num_padding


def _read_criteria(criteria: Sequence[Any]) -> tuple[int, frozenset[int], list[str]]:
    """Returns the most tokens with the prompt, the ids that end the text, and the strings that do."""
    length, eos_token_ids, strings = 0, frozenset[int](), list[str]()
    for each in criteria:
        match type(each):
            case of_transformers.MaxLengthCriteria:
                length = min(length or each.max_length, each.max_length)
            case of_transformers.EosTokenCriteria:
                eos_token_ids |= set(each.eos_token_id.tolist())
            case of_transformers.StopStringCriteria:
                strings += each.stop_strings
            case other:
                raise UsageError(
                    f"stopping_criteria: {other.__name__}",
                    "the verifier ends a text by its length, eos_token_id and stop_strings",
                )
    return length, eos_token_ids, strings


def _word(tokenizer: EdgeTokenizer, token_ids: TokenIds) -> str:
    """Returns the text of a bad word; the verifier is sent the tokens of it."""
    if not (unknown := [each for each in token_ids if each >= tokenizer.num_tokens]):
        text = tokenizer.decode(token_ids)
        if text and tuple(tokenizer.encode(text, is_complete=True)) == token_ids:
            return text
    what = "there are no such tokens" if unknown else "they are not the tokens of any text"
    raise UsageError(f"bad_words_ids: {list(token_ids)}", f"{what}; a bad word is a text")
