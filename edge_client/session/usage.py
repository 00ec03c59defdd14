"""The usage block: OpenAI's counts, and ours under `outrider`."""

from __future__ import annotations

from outrider.edge_client.config.methods import is_reproducible, judging_method
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.controller.slow_draft import target_step_ms
from outrider.edge_client.session.session import SessionResult

# Of the summary that `run --json` prints too.
_FROM_STATS = (
    "stretches",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "acceptance_rate",
    "tokens_per_round",
    "draft_length",
    "ttft_ms",
    "tpot_ms",
    "tokens_per_s",
    "rtt_ms",
    "net_ms",
    "bytes_up",
    "bytes_down",
    "num_learned_tokens",
    "learn_bytes_down",
    "pipelined_hit_rate",
    "num_wasted_draft_tokens",
    "num_gate_tokens",
    "num_kept_blocks",
    "num_escalations",
    "hard_ratio",
    "mc_dropout_ms",
    "verifier_calls_per_token",
    "num_reverified_tokens",
    "num_rolled_back_tokens",
    "num_timeouts",
    "num_rebuilds",
    "num_reconnects",
    "num_refusals",
)


def make_usage(
    result: SessionResult, config: RunConfig, num_prompt_tokens: int, seed: int, num_reused_tokens: int
) -> dict[str, object]:
    """Returns the answer's `usage`. `num_reused_tokens` of the prompt were in the draft's KV cache
    already."""
    num_tokens = len(result.token_ids)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "outrider": make_extras(result, config, seed, num_reused_tokens),
    }


def make_extras(
    result: SessionResult, config: RunConfig, seed: int, num_reused_tokens: int
) -> dict[str, object]:
    """Returns `usage.outrider`: how the text was made, and its counts and times."""
    stats, method = result.stats.summary(result.origins), judging_method(config)
    target_ms = target_step_ms(result.stats)
    num_unverified = result.num_unverified_tokens
    return {
        "seed": seed,
        "mode": config.mode,
        "method": method,
        "gate": config.gate.use,
        "exact": (method is None or method.is_exact) and num_unverified == 0 if result.token_ids else None,
        "reproducible": is_reproducible(config, result.model, num_unverified),
        "finish_reason": str(result.finish_reason),
        "num_unverified_tokens": num_unverified,
        "num_approximate_tokens": sum(result.token_is_approximate),
        "num_reused_draft_tokens": num_reused_tokens,
        **{name: stats.get(name) for name in _FROM_STATS},
        "cloud_only_ms_per_token": None if target_ms is None else round(target_ms, 3),  # an estimate
    }
