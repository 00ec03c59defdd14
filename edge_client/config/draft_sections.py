"""Sections of the configuration about drafting: the draft, its length, pipelining and the gate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.common.config.loader import option
from outrider.edge_client.controller.depth.registry import DEPTH_POLICIES
from outrider.edge_client.core.options import Pipelining
from outrider.edge_client.drafting.backend import BACKENDS, KV_DTYPES, ONNX, WEIGHTS, BackendSettings
from outrider.edge_client.drafting.base import DEFAULT_MAX_NGRAM
from outrider.edge_client.drafting.registry import DEFAULT_SUFFIX_TOKENS, MODEL, STRATEGIES, CopySettings
from outrider.edge_client.drafting.trees import DEFAULT_DEPTH, DEFAULT_WIDTH, MAX_CONTINUATIONS
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.gate.rules import RULES
from outrider.edge_client.gate.words import DEFAULT_RARE_PER_MILLION


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Configures the draft."""

    directory: str = option(
        "",
        "directory of a draft and its tokenizer: an exported one, or with --draft-backend torch a Hugging Face "
        "directory; empty is the embedded one",
        metavar="DIR",
        key="draft",
    )
    strategy: str = option(
        MODEL,
        "model drafts with the model of --draft; prompt-lookup copies the tokens that followed the same words "
        "earlier in the text, suffix those that followed them there and in your earlier texts, valued by counts, "
        "retrieval those in a --datastore: they need no model (of --draft only tokenizer.json). model+suffix and its "
        "like do both; staged guesses by suffix what the model is about to draft, which then takes fewer runs",
        choices=STRATEGIES,
    )
    lookup_ngram: int = option(
        DEFAULT_MAX_NGRAM,
        "longest run of tokens that prompt-lookup searches for",
        metavar="N",
        minimum=1,
        maximum=64,
        key="lookup_ngram",
    )
    suffix_tokens: int = option(
        DEFAULT_SUFFIX_TOKENS,
        "tokens of each user's earlier texts that suffix searches beside the present one; 0 is none",
        metavar="N",
        minimum=0,
        maximum=10_000_000,
        key="suffix_tokens",
    )
    suffix_store: Path | None = option(
        None,
        "directory where suffix keeps earlier texts between runs, in files that only you can read; none: in memory "
        "alone",
        metavar="DIR",
        key="suffix_store",
    )
    datastore: Path | None = option(
        None,
        "file of other texts that retrieval copies from; `edge-client draft datastore build` writes it",
        metavar="FILE",
        key="datastore",
    )
    learn: Path | None = option(
        None,
        "learn a head for the draft from the target's 8 likeliest tokens at each position, which verdicts then carry, "
        "and keep it in DIR; it drafts while it was better than the draft alone. Goes with --method coupled; the text "
        "stays the same",
        metavar="DIR",
        key="learn",
    )
    threads: int = option(1, "CPU threads that the draft uses", metavar="N", minimum=1)
    backend: str = option(
        ONNX,
        "what computes the draft model: onnxruntime on the CPU, of an exported draft (onnx), or PyTorch, of a Hugging "
        "Face directory (torch; extra edge-torch)",
        choices=BACKENDS,
    )
    device: str = option(
        "auto",
        "with --draft-backend torch: cpu, cuda, cuda:N, mps or another of torch's devices; auto is the accelerator "
        "where there is one, else the CPU",
        metavar="DEVICE",
    )
    weights: str = option(
        "auto",
        "with --draft-backend torch: what the weights are kept as; nf4 is bitsandbytes', auto is bfloat16, or float32 "
        "on a CPU",
        choices=WEIGHTS,
    )
    kv_dtype: str = option(
        "auto",
        "with --draft-backend torch: what KV is kept as; fp8 takes half of bfloat16's memory, auto is what the model "
        "computes in",
        choices=KV_DTYPES,
    )

    @property
    def copies(self) -> CopySettings:
        """Returns the settings of strategies that copy."""
        return CopySettings(self.lookup_ngram, self.suffix_tokens, self.suffix_store, self.datastore)

    @property
    def runtime(self) -> BackendSettings:
        """Returns the settings of what computes the draft model."""
        return BackendSettings(self.backend, self.device, self.weights, self.kv_dtype)


@dataclass(frozen=True, slots=True)
class PipeliningConfig:
    """Configures pipelining: sending the next round before the last verdict has arrived."""

    use: Pipelining = option(
        Pipelining.AUTO,
        "send the next rounds before the last verdict has arrived: never (off), always (on), or while that "
        "is expected to be faster and does not change the text (auto). On goes with --mode speculative or auto, "
        "and --transport stream",
        key="pipeline",
    )
    num_rounds_in_flight: int | None = option(
        None,
        "most rounds in flight while pipelining; none: chosen from the round trip and the draft's speed",
        metavar="N",
        minimum=2,
        maximum=16,
    )
    guesses: Literal["off", "auto"] = option(
        "auto",
        "while pipelining with method coupled: also send rounds for a possible rejection and its likeliest "
        "correction; never (off), or where they are more likely to be used than further drafting (auto)",
    )


@dataclass(frozen=True, slots=True)
class DepthConfig:
    """Configures the draft length."""

    num_speculative_tokens: int | None = option(
        None,
        "tokens drafted in each round, or in the first one of another --depth-policy than fixed; none is the "
        "policy's own: fixed and window 4, ratio and optimal 6",
        metavar="N",
        minimum=0,
        maximum=1024,
    )
    policy: str | None = option(
        None,
        "rule for the draft length: always --num-speculative-tokens (fixed); one more or less than before, by "
        "the last round's acceptance (ratio) or that of ten rounds (window); or the length, up to 64, with "
        "the most tokens a second by measured times and the draft's confidence (optimal). None is optimal, or "
        "fixed with --num-speculative-tokens, another --method than coupled, or --gate commit",
        choices=DEPTH_POLICIES,
        key="depth_policy",
    )


MAX_NODES = 1024  # of a tree that may be asked for; a verifier takes fewer


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Configures drafts that are trees."""

    use: Literal["auto", "off"] | int | None = option(
        None,
        "draft trees, several continuations that share their beginnings, in place of one chain: never (off), of N "
        "tokens each round (N), or where that is expected to be faster, as large as pays (auto). None is auto where "
        "the draft length is free too, else off. Goes with --mode speculative or auto, N with co-located too, and "
        "with --method coupled, sparse or typical; auto not with typical",
        metavar="auto|off|N",
        minimum=1,
        maximum=MAX_NODES,
        key="tree",
    )
    width: int | None = option(
        None,
        f"most tokens that may follow one of a tree's tokens; none is {DEFAULT_WIDTH}",
        metavar="N",
        minimum=1,
        maximum=MAX_CONTINUATIONS,
    )
    depth: int | None = option(
        None,
        f"most tokens of a tree's path, and runs of the draft for it; none is {DEFAULT_DEPTH}",
        metavar="N",
        minimum=1,
        maximum=64,
    )
    shape: Path | None = option(
        None,
        "with --tree N: every tree has the first N nodes of a shape that `python -m "
        "outrider.training.calibrate_tree` wrote, in place of those that are worth most there",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Configures the gate: which drafted tokens are hard, and what is done with them."""

    use: GateUse = option(
        GateUse.OFF,
        "what to do by how unsure the draft is: end a draft early and send it (stop; the text stays exact), "
        "or send only unsure drafts and keep the others without asking the target (commit; approximate, and "
        "marked so)",
        key="gate",
    )
    nll: float | None = option(
        None,
        "a drafted token is hard where its negative log-likelihood is above this, in nats",
        metavar="X",
        minimum=0.0,
    )
    entropy: float | None = option(
        None,
        "a position is hard where the entropy of the draft's distribution is above this, in bits",
        metavar="X",
        minimum=0.0,
    )
    margin: float | None = option(
        None,
        "a position is hard where the draft's two highest probabilities differ by less than this",
        metavar="P",
        minimum=0.0,
        maximum=1.0,
    )
    variance: float | None = option(
        None,
        "a position is hard where the most probable token's ln p varies by more than this under dropout "
        "(variance); needs the draft's variant for it (`edge-client draft add-dropout`)",
        metavar="X",
        minimum=0.0,
    )
    max_hard_ratio: float | None = option(
        None,
        "share of a draft's tokens that may be hard before the gate acts; none is 0: one hard token is enough",
        metavar="R",
        minimum=0.0,
        maximum=1.0,
    )
    rules: tuple[str, ...] = option(
        (),
        f"kinds of text that only the target may write: {', '.join(RULES)}; a list with commas",
        metavar="RULE",
    )
    ner: str = option(
        "",
        "spaCy pipeline (extra ner) that finds names for the rule entities, instead of capital letters",
        metavar="NAME|DIR",
    )
    rare_per_million: float | None = option(
        None,
        "rule rare: words below this frequency in the text of the --gate-file; none is "
        f"{DEFAULT_RARE_PER_MILLION:g}",
        metavar="N",
        minimum=0.0,
    )
    file: Path | None = option(
        None, "thresholds that `edge-client calibrate` wrote; flags override them", metavar="FILE"
    )
