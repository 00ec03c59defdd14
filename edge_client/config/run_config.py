"""The edge's configuration: one frozen dataclass, from which flags, YAML keys and variables come."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.common.config.loader import option
from outrider.common.methods import DEFAULT_SUPPORT_SIZE, MAX_SUPPORT_SIZE
from outrider.common.types import Method
from outrider.edge_client.config.serve import ServeConfig
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.drafting.registry import DEFAULT_MAX_NGRAM, STRATEGIES
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.gate.rules import RULES
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION
from outrider.models import EMBEDDED

SCOPE = "edge"
_ON_TIMEOUT = ("first_token", "edge_only", "wait", "fail")


def _names(is_exact: bool) -> str:
    return ", ".join(method for method in Method if method.is_exact is is_exact)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """`edge-client run`, and what every other verb that decodes shares with it."""

    verifier: str = option(
        "127.0.0.1:7077",
        "the cloud verifier; of several (A:7077,B:7077, or dns:///NAME:7077 for all addresses of a name) "
        "each session has one, and the next where that is gone",
        metavar="HOST:PORT",
    )
    draft: str = option(
        "", "directory of an exported draft and its tokenizer; empty is the embedded one", metavar="DIR"
    )
    draft_strategy: str = option(
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
    )
    draft_threads: int = option(1, "CPU threads of the draft", metavar="N", minimum=1)
    mode: str = option(
        "speculative",
        "draft here and verify there; or the target alone, streamed; or draft and verify both there; "
        "or the draft alone, unverified; or (auto) the first, pipelined or not, or the second, whichever is "
        "soonest by what is measured. The second and third need of --draft DIR the tokenizer.json alone",
        choices=("speculative", "cloud-only", "co-located", "edge-only", "auto"),
    )
    pipeline: str = option(
        "off",
        "speculative: draft on and send the next rounds while some are under way; never, always, or (auto) "
        "while that is expected to be faster. --mode auto decides it too. Needs --transport stream",
        choices=("off", "on", "auto"),
    )
    num_rounds_in_flight: int | None = option(
        None,
        "rounds under way at most while it pipelines; none: as many as trip and draft ask for",
        metavar="N",
        minimum=2,
        maximum=16,
    )
    guesses: str = option(
        "auto",
        "while it pipelines, with method coupled: send rounds behind guesses at a rejection too; never, or "
        "(auto) where one is likelier to be used than what else could be drafted",
        choices=("off", "auto"),
    )
    max_new_tokens: int = option(256, "tokens to generate at most", metavar="N", minimum=1)
    num_speculative_tokens: int | None = option(
        None,
        "tokens to draft in one round; for every depth policy but fixed, in the first one. None is the "
        "policy's own: fixed and window 4, ratio and optimal 6",
        metavar="N",
        minimum=0,
        maximum=1024,
    )
    depth_policy: str = option(
        "fixed",
        "how many tokens a round drafts: always --num-speculative-tokens; one more or less than the last, by "
        "how that went (ratio) or by the acceptance of ten rounds (window); or as many, up to 64, as make "
        "the most tokens a second by what rounds measured and how sure the draft is (optimal)",
        choices=DEPTH_POLICIES,
    )
    gate: str = option(
        "off",
        "what the draft's doubts are for: it ends where it is unsure, and is sent (stop: the text stays "
        "exact); or it is sent where it is unsure, and kept without asking where it is not (commit: the "
        "text is no longer the target's own, and says so)",
        choices=tuple(GateUse),
    )
    gate_nll: float | None = option(
        None, "hard: a drafted token with more than this, in nats", metavar="X", minimum=0.0
    )
    gate_entropy: float | None = option(
        None,
        "hard: a place where the draft's distribution has more than this, in bits",
        metavar="X",
        minimum=0.0,
    )
    gate_margin: float | None = option(
        None,
        "hard: a place where its most probable token is less than this above the second",
        metavar="P",
        minimum=0.0,
        maximum=1.0,
    )
    gate_variance: float | None = option(
        None,
        "hard: a place where the variance of that token's ln p under dropout is above this; needs the "
        "draft's variant for it (`edge-client draft add-dropout`)",
        metavar="X",
        minimum=0.0,
    )
    gate_max_hard_ratio: float | None = option(
        None,
        "share of a block that may be hard before the target is asked; none is 0: any hard token asks",
        metavar="R",
        minimum=0.0,
        maximum=1.0,
    )
    gate_rules: tuple[str, ...] = option(
        (),
        f"what the target is always asked for, by the text drafted: {', '.join(RULES)}; a list with commas",
        metavar="RULE",
    )
    gate_ner: str = option(
        "",
        "the rule entities by this spaCy pipeline (extra ner) in place of capital letters",
        metavar="NAME|DIR",
    )
    gate_rare_per_million: float | None = option(
        None,
        "the rule rare: words that are rarer than this in the text of the --gate-file; none is "
        f"{DEFAULT_RARE_PER_MILLION:g}",
        metavar="N",
        minimum=0.0,
    )
    gate_file: Path | None = option(
        None, "thresholds that `edge-client calibrate` wrote; flags come before it", metavar="FILE"
    )
    temperature: float = option(0.8, "0 is greedy", metavar="T")
    top_k: int = option(0, "sample from the K most probable tokens; 0 is off", metavar="K")
    top_p: float = option(1.0, "sample from the smallest set with this probability; 1 is off", metavar="P")
    min_p: float = option(0.0, "leave out tokens below this share of the best one's probability", metavar="P")
    repetition_penalty: float = option(1.0, "divides scores of tokens seen before; 1 is off", metavar="R")
    presence_penalty: float = option(0.0, "subtracted from scores of generated tokens", metavar="P")
    frequency_penalty: float = option(0.0, "the same, for each time they occur", metavar="P")
    logit_bias: tuple[str, ...] = option(
        (), "added to the score of token ID; may be repeated, or a list with commas", metavar="ID:B"
    )
    bad_word: tuple[str, ...] = option((), "a word never to write; may be repeated", metavar="TEXT")
    min_new_tokens: int = option(0, "no end of text before this many tokens", metavar="N", minimum=0)
    stop: tuple[str, ...] = option((), "text to stop before; may be repeated", metavar="TEXT")
    stop_token_id: tuple[int, ...] = option((), "token to stop after; may be repeated", metavar="ID")
    ignore_eos: bool = option(False, "go on after the model's end of text")
    seed: int | None = option(None, "of the noise; without one a random seed is drawn and printed")
    method: str = option(
        "coupled",
        f"how drafted tokens are judged. Exact: {_names(is_exact=True)}. Approximate, so that the text is no "
        f"longer the target's: {_names(is_exact=False)}",
        choices=tuple(Method),
    )
    support_size: int | None = option(
        None,
        "sparse and block: ids a drafted token's distribution is sampled from and sent with; none is "
        f"{DEFAULT_SUPPORT_SIZE}",
        metavar="N",
        minimum=1,
        maximum=MAX_SUPPORT_SIZE,
    )
    num_candidates: int | None = option(
        None,
        "candidates: samples of the target's in an answer that rejects; none is the verifier's choice, 4",
        metavar="N",
        minimum=1,
        maximum=64,
    )
    threshold_pass: float | None = option(
        None,
        "threshold: keep tokens that have this probability under the target; none is the verifier's, 0.3",
        metavar="P",
        minimum=1e-6,
        maximum=1.0,
    )
    threshold_ratio: float | None = option(
        None,
        "threshold: keep tokens with this share of their probability under the draft; none is the "
        "verifier's, 0.5",
        metavar="R",
        minimum=1e-6,
        maximum=1e6,
    )
    typical_epsilon: float | None = option(
        None,
        "typical: keep tokens above this probability; none is the verifier's, 0.09",
        metavar="P",
        minimum=1e-6,
        maximum=1.0,
    )
    typical_delta: float | None = option(
        None,
        "typical: or above this times exp(-entropy); none is the verifier's, 0.3",
        metavar="D",
        minimum=1e-6,
        maximum=1.0,
    )
    logprobs: int = option(
        0,
        "with --json: each token's log-probability under the target, before and after the sampling "
        "parameters, and those of the N most probable tokens; 0 is off",
        metavar="N",
        minimum=0,
        maximum=20,
    )
    transport: str = option(
        "stream", "one stream for a session, or single calls where streams break", choices=("stream", "unary")
    )
    tls: bool = option(False, "speak TLS, with the authorities this machine trusts")
    tls_ca: Path | None = option(
        None, "speak TLS, with this authority of the verifier's certificate; PEM", metavar="FILE"
    )
    tls_cert: Path | None = option(
        None, "certificate of this edge, where the verifier wants one; PEM", metavar="FILE"
    )
    tls_key: Path | None = option(None, "its private key; PEM, without a password", metavar="FILE")
    tls_server_name: str = option(
        "", "name that the verifier's certificate must have; empty is the host of --verifier", metavar="NAME"
    )
    token_file: Path | None = option(
        None, "file with the token of `cloud-verifier token new`; read at each connection", metavar="FILE"
    )
    token: str = option("", "the token itself", is_flag=False, is_secret=True)
    insecure_token: bool = option(
        False, "send the token unencrypted beyond this machine; for networks you trust"
    )
    on_timeout: str = option(
        "first_token",
        "when a round gets no answer in time: keep the draft's first token, marked; go on alone, marked; "
        "wait, and stay exact; or end with an error",
        choices=_ON_TIMEOUT,
    )
    timeout_ms: float | None = option(
        None,
        "deadline of a round; default: 400 ms or twice what rounds took lately",
        metavar="MS",
        minimum=1,
        maximum=86_400_000,  # a day: what waits and what goes over the wire can be counted
    )
    recover_timeout_s: float = option(
        60.0,
        "patience with a lost link or session",
        flag="--recover-timeout",
        metavar="S",
        minimum=0.1,
        maximum=604_800.0,
    )
    reverify: bool = option(
        False,
        "have tokens that were kept unverified judged once the link is back, and where the target disagrees "
        "take the text back to there; a pipe, and the daemon's clients, get text only once it is verified. "
        "Needs --method coupled",
    )
    allow_target_change: bool = option(False, "go on when the verifier comes back with another target")
    min_draft_ms: float = option(
        0.0,
        "stretch each drafted token to this, to stand for a larger draft; results carry the label",
        metavar="MS",
        minimum=0.0,
    )
    log_level: str = option(
        "warning", "how much to log, on stderr", choices=("debug", "info", "warning", "error")
    )
    otlp_endpoint: str = option(
        "", "collector to send OpenTelemetry spans to; needs the otel extra", metavar="URL"
    )
    serve: ServeConfig = field(default_factory=ServeConfig)


def default_draft_dir() -> Path:
    """The embedded draft: beside the source tree, else under the working directory."""
    in_tree = EMBEDDED / "draft"
    return in_tree if in_tree.is_dir() else Path("models/embedded/draft")
