"""The settings beside the generation config: which are of the connection, which of one call, which of neither."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.common.errors import ConfigError
from outrider.edge_client.config.request_settings import OF_DRAFT, OF_OPENAI, OF_REQUESTS
from outrider.edge_client.core.options import ExecutionMode

OF_GENERATION = (  # settings of a call that `model.generate` has names of its own for
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "bad_word",
    "stop",
    "stop_token_id",
    "ignore_eos",
    "seed",
)


def split_settings(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Returns those of the connection, and those of the call. Raises `ConfigError` for what is set elsewhere."""
    for name in settings:
        if name in OF_GENERATION:
            raise ConfigError(
                f"settings: {name} is the generation config's", "give it to model.generate by its name there"
            )
        if name in OF_DRAFT:
            raise ConfigError(f"settings: {name} has no effect", "the draft is the model itself")
        if name == "mode" and settings[name] == ExecutionMode.EDGE_ONLY:
            raise ConfigError(
                "settings: mode edge-only", "the text would be the model's own: call its generate"
            )
        if name == "verifier":
            raise ConfigError("settings: verifier", "give it to model.generate by its name")
    of_call = {name: value for name, value in settings.items() if name in (*OF_REQUESTS, *OF_OPENAI)}
    return {name: value for name, value in settings.items() if name not in of_call}, of_call
