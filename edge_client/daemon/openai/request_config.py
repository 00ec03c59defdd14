"""Makes the configuration of one request from the daemon's own."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.edge_client.config.request_config import NoEffectError, request_config
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.daemon.openai.errors import unsupported
from outrider.edge_client.daemon.openai.parsed import Kind, ParsedRequest

# OpenAI's own default of /v1/completions, and vLLM's: a model without a chat template seldom ends its text.
DEFAULT_COMPLETION_TOKENS = 16


def config_of(
    base: RunConfig, parsed: ParsedRequest, tool_changes: Mapping[str, object] | None = None
) -> RunConfig:
    """Returns the request's configuration, with what its tools need (`tool_changes`). Raises `ApiError` naming a
    setting of the request that would have no effect."""
    num_top = parsed.num_top_logprobs
    changes = {
        **parsed.changes,
        **(tool_changes or {}),
        "logprobs": 0 if num_top is None else max(1, num_top),
    }
    if parsed.kind is Kind.COMPLETION and base.max_new_tokens is None:
        changes.setdefault("max_new_tokens", DEFAULT_COMPLETION_TOKENS)
    if parsed.seed is not None:
        changes["seed"] = parsed.seed
    try:
        return request_config(base, changes)
    except NoEffectError as error:
        raise unsupported(f"outrider.{error.setting}", error.reason) from error
