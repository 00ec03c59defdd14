"""Lists fields that are taken for some of their values alone, or for all: those of OpenAI, vLLM and llama-server that
ask for what is done anyway, or change nothing of the answer."""

from __future__ import annotations

from outrider.edge_client.daemon.openai.errors import unsupported

Refusal = tuple[tuple[object, ...], str]  # values that ask for nothing, and why the others are refused

# They change nothing of an answer, whatever they say.
PASSED = frozenset(
    (
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_prompt",
        "cache_salt",
        "priority",
        "request_id",
        "id_slot",
        "timings_per_token",
        "return_progress",
        "spaces_between_special_tokens",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
    )
)
PASSED_IN_STREAM_OPTIONS = frozenset(("continuous_usage_stats", "include_obfuscation"))

_OLD_TOOLS = "give tools and tool_choice, which replace it"
_OF_CHATS = "it belongs to /v1/chat/completions"
_NOT_BUILT = "it is not built here"
REFUSED: dict[str, Refusal] = {
    "use_beam_search": ((False,), _NOT_BUILT),
    "length_penalty": ((1, 1.0), "it goes with beam search"),
    "early_stopping": ((False,), "it goes with beam search"),
    "include_stop_str_in_output": ((False,), "text ends before its stop string"),
    "prompt_logprobs": ((), "log-probabilities are those of generated tokens"),
    "allowed_token_ids": (([],), "give a grammar, or logit_bias"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "return_tokens_as_token_ids": ((False,), _NOT_BUILT),
    "return_token_ids": ((False,), _NOT_BUILT),
    "add_special_tokens": ((), "prompts get the tokenizer's special tokens, chats those of the template"),
    "grammar": (("",), 'GBNF is not read; give a Lark grammar as "outrider": {"grammar": ...}'),
    "repeat_penalty": ((1, 1.0), "it looks at the last tokens alone; repetition_penalty looks at all"),
    "repeat_last_n": ((), "repetition_penalty looks at all tokens"),
    "typical_p": ((1, 1.0), _NOT_BUILT),
    "tfs_z": ((1, 1.0), _NOT_BUILT),
    "mirostat": ((0,), _NOT_BUILT),
    "dynatemp_range": ((0, 0.0), _NOT_BUILT),
    "xtc_probability": ((0, 0.0), _NOT_BUILT),
    "dry_multiplier": ((0, 0.0), _NOT_BUILT),
    "samplers": ((), "the order of sampling parameters is fixed"),
    "n_probs": ((0,), "give logprobs"),
    "logits_processors": (([],), _NOT_BUILT),
    "lora": (([],), "there is one model"),
}
REFUSED_IN_COMPLETIONS: dict[str, Refusal] = {
    "tools": (([],), _OF_CHATS),
    "tool_choice": (("none",), _OF_CHATS),
    "chat_template_kwargs": (({},), _OF_CHATS),
    "suffix": (("",), "text is continued, not filled in"),
}
REFUSED_IN_CHAT: dict[str, Refusal] = {
    "echo": ((False,), "messages are not sent back"),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none",), _OLD_TOOLS),
    "add_generation_prompt": ((True,), "an answer follows the messages"),
    "continue_final_message": ((False,), "an answer follows the messages"),
    "chat_template": ((), "the template is the daemon's (--chat-template)"),
    "documents": (([],), _NOT_BUILT),
    "modalities": ((["text"],), "this model writes text"),
    "audio": ((), "this model writes text"),
    "prediction": ((), "the draft model predicts here"),
    "reasoning_effort": (("none",), "a variable of the chat template is set by chat_template_kwargs"),
    "verbosity": (("medium",), "this model has no such setting"),
    "web_search_options": ((), "nothing is searched"),
}


def check_neutral(name: str, value: object, refusal: Refusal) -> None:
    """Raises `ApiError` naming a field whose value asks for more than is done."""
    neutral, reason = refusal
    if not any(value == each and type(value) is type(each) for each in neutral):
        raise unsupported(name, reason)
