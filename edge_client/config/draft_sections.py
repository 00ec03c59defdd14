"""Sections of the configuration about drafting: the draft, its length, pipelining and the gate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.common.config.loader import option
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.controller.window import Pipelining
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM
from outrider.edge_client.drafting.registry import STRATEGIES
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.gate.rules import RULES
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Says which draft proposes tokens, and by which means."""

    directory: str = option(
        "",
        "directory of an exported draft and its tokenizer; empty is the embedded one",
        metavar="DIR",
        key="draft",
    )
    strategy: str = option(
        "onnx",
        "how to draft: with the exported model; or without one, by copying what followed the last tokens "
        "earlier in the text (--draft then needs a tokenizer.json only)",
        choices=STRATEGIES,
    )
    lookup_ngram: int = option(
        DEFAULT_MAX_NGRAM,
        "longest run of tokens that prompt-lookup looks for",
        metavar="N",
        minimum=1,
        maximum=64,
        key="lookup_ngram",
    )
    threads: int = option(1, "CPU threads of the draft", metavar="N", minimum=1)


@dataclass(frozen=True, slots=True)
class PipeliningConfig:
    """Says when further rounds are sent before the last one is answered, and how many."""

    use: Pipelining = option(
        Pipelining.OFF,
        "speculative: draft on and send the next rounds while some are under way; never, always, or (auto) "
        "while that is expected to be faster. --mode auto decides it too. Needs --transport stream",
        key="pipeline",
    )
    num_rounds_in_flight: int | None = option(
        None,
        "rounds under way at most while it pipelines; none: as many as trip and draft ask for",
        metavar="N",
        minimum=2,
        maximum=16,
    )
    guesses: Literal["off", "auto"] = option(
        "auto",
        "while it pipelines, with method coupled: send rounds behind guesses at a rejection too; never, or "
        "(auto) where one is likelier to be used than what else could be drafted",
    )


@dataclass(frozen=True, slots=True)
class DepthConfig:
    """Says how many tokens a round drafts."""

    num_speculative_tokens: int | None = option(
        None,
        "tokens to draft in one round; for every depth policy but fixed, in the first one. None is the "
        "policy's own: fixed and window 4, ratio and optimal 6",
        metavar="N",
        minimum=0,
        maximum=1024,
    )
    policy: str = option(
        "fixed",
        "how many tokens a round drafts: always --num-speculative-tokens; one more or less than the last, by "
        "how that went (ratio) or by the acceptance of ten rounds (window); or as many, up to 64, as make "
        "the most tokens a second by what rounds measured and how sure the draft is (optimal)",
        choices=DEPTH_POLICIES,
        key="depth_policy",
    )


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Says what is done where the draft is unsure, and what counts as unsure."""

    use: GateUse = option(
        GateUse.OFF,
        "what the draft's doubts are for: it ends where it is unsure, and is sent (stop: the text stays "
        "exact); or it is sent where it is unsure, and kept without asking where it is not (commit: the "
        "text is no longer the target's own, and says so)",
        key="gate",
    )
    nll: float | None = option(
        None, "hard: a drafted token with more than this, in nats", metavar="X", minimum=0.0
    )
    entropy: float | None = option(
        None,
        "hard: a place where the draft's distribution has more than this, in bits",
        metavar="X",
        minimum=0.0,
    )
    margin: float | None = option(
        None,
        "hard: a place where its most probable token is less than this above the second",
        metavar="P",
        minimum=0.0,
        maximum=1.0,
    )
    variance: float | None = option(
        None,
        "hard: a place where the variance of that token's ln p under dropout is above this; needs the "
        "draft's variant for it (`edge-client draft add-dropout`)",
        metavar="X",
        minimum=0.0,
    )
    max_hard_ratio: float | None = option(
        None,
        "share of a block that may be hard before the target is asked; none is 0: any hard token asks",
        metavar="R",
        minimum=0.0,
        maximum=1.0,
    )
    rules: tuple[str, ...] = option(
        (),
        f"what the target is always asked for, by the text drafted: {', '.join(RULES)}; a list with commas",
        metavar="RULE",
    )
    ner: str = option(
        "",
        "the rule entities by this spaCy pipeline (extra ner) in place of capital letters",
        metavar="NAME|DIR",
    )
    rare_per_million: float | None = option(
        None,
        "the rule rare: words that are rarer than this in the text of the --gate-file; none is "
        f"{DEFAULT_RARE_PER_MILLION:g}",
        metavar="N",
        minimum=0.0,
    )
    file: Path | None = option(
        None, "thresholds that `edge-client calibrate` wrote; flags come before it", metavar="FILE"
    )
