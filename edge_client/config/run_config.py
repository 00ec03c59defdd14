"""The edge's configuration: one frozen dataclass in sections, which flags, YAML keys and variables come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.common.config.loader import option, section, with_values
from outrider.common.methods import DEFAULT_SUPPORT_SIZE, MAX_SUPPORT_SIZE
from outrider.common.types import DRAFT_SOURCE, Method
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.config.draft_sections import (
    DepthConfig,
    DraftConfig,
    GateConfig,
    PipeliningConfig,
    TreeConfig,
)
from outrider.edge_client.config.grammar import GrammarConfig
from outrider.edge_client.config.link_sections import ConnectionConfig, LogConfig, OutageConfig
from outrider.edge_client.config.preset_section import PresetConfig
from outrider.edge_client.core.options import REQUESTABLE_MODES, ExecutionMode
from outrider.edge_client.gate.gate import GateUse
from outrider.models import EMBEDDED


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
    """Configures where generation ends, `max_new_tokens` apart, and what of its tokens is text."""

    min_new_tokens: int = option(
        0, "fewest tokens to generate before an end of text or anything to stop at", metavar="N", minimum=0
    )
    strings: tuple[str, ...] = option((), "text to stop before; may be repeated", metavar="TEXT", key="stop")
    token_ids: tuple[int, ...] = option(
        (), "token to stop after; may be repeated", metavar="ID", key="stop_token_id"
    )
    ignore_eos: bool = option(False, "continue after the model's end of text")
    show_special_tokens: bool = option(False, "keep the names of special tokens in the text")


@dataclass(frozen=True, slots=True)
class VerificationConfig:
    """Configures the verification method."""

    method: Method = option(
        Method.COUPLED,
        "verification method. Exact: coupled (default: both sides sample with the same noise), sparse (speculative "
        "sampling: rejection with the residual, the draft's distribution sent for --support-size ids), block (block "
        "verification; sends the same), candidates (speculative sampling; the edge chooses the correction). "
        "Approximate: shortcut (corrects from the target's distribution), scalar_residual (the same without the "
        "rejected token), threshold (accepts by the target's probability or its ratio to the draft's), typical "
        "(Medusa's typical acceptance)",
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


SCOPE = "edge"
_DRAFT = "verifier and draft"
_WORK = "mode, draft length and pipelining"
_SAMPLING = "sampling"
_END = "end of the text"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configures `edge-client run`, and every other verb that decodes."""

    verifier: str = option(
        "127.0.0.1:7077",
        "the cloud verifier, or several: A:7077,B:7077, or dns:///NAME:7077 for all addresses of a name. A "
        "session uses one of them, and another where that one is gone",
        metavar="HOST:PORT",
        title=_DRAFT,
    )
    draft: DraftConfig = section(DraftConfig, "draft_", _DRAFT)
    mode: ExecutionMode = option(
        ExecutionMode.AUTO,
        "change between speculative, pipelined or not, and cloud-only by measured speed, where that does not "
        "change the text, else speculative (auto); draft here and verify in the cloud (speculative); decode in "
        "the cloud without a draft (cloud-only); draft and verify in the cloud (co-located); or draft here, "
        "unverified (edge-only). cloud-only and co-located need only the tokenizer.json of --draft DIR",
        choices=REQUESTABLE_MODES,
        title=_WORK,
    )
    draft_source: str = option(
        DRAFT_SOURCE,
        "what drafts in mode co-located: the verifier's draft, or another source that it serves (medusa, hydra, "
        "eagle, early_exit, lookahead)",
        metavar="NAME",
        title=_WORK,
    )
    preset: PresetConfig = section(PresetConfig, title="verification method")
    pipelining: PipeliningConfig = section(PipeliningConfig, title=_WORK)
    max_new_tokens: int | None = option(
        256,
        "most tokens to generate; none: up to an end of text or the full context",
        metavar="N",
        minimum=1,
        title=_END,
    )
    depth: DepthConfig = section(DepthConfig, title=_WORK)
    tree: TreeConfig = section(TreeConfig, "tree_", _WORK)
    gate: GateConfig = section(GateConfig, "gate_", "gate")
    sampling: SamplingConfig = section(SamplingConfig, title=_SAMPLING)
    stop: StopConfig = section(StopConfig, title=_END)
    grammar: GrammarConfig = section(GrammarConfig, title="structured output")
    seed: int | None = option(
        None, "seed of the sampling noise; without one a random seed is drawn and printed", title=_SAMPLING
    )
    verification: VerificationConfig = section(VerificationConfig, title="verification method")
    logprobs: int = option(
        0,
        "with --json: each token's log-probability under the target, before and after the sampling "
        "parameters, and those of the N most probable tokens; 0 is off",
        metavar="N",
        minimum=0,
        maximum=20,
        title=_SAMPLING,
    )
    connection: ConnectionConfig = section(ConnectionConfig, title="encryption and credentials")
    outage: OutageConfig = section(OutageConfig, title="when the link fails")
    min_draft_ms: float = option(
        0.0,
        "stretch each drafted token to this time, to simulate a larger draft; results carry a label",
        metavar="MS",
        minimum=0.0,
        title=_DRAFT,
    )
    logs: LogConfig = section(LogConfig, "log_", "logs and traces")
    serve: DaemonConfig = section(DaemonConfig, "serve.", "the daemon")

    @property
    def may_adapt(self) -> bool:
        """Returns whether the text is the same with any mode and draft length, so that they may follow what is
        measured: with the same seed another method, or the commit gate, writes another text. A tree of a given
        size is a length that is given."""
        is_same = self.verification.method is Method.COUPLED and self.gate.use is not GateUse.COMMIT
        return is_same and not isinstance(self.tree.use, int)

    @property
    def depth_policy(self) -> str:
        """Returns `--depth-policy`, or its default."""
        is_best = self.may_adapt and self.depth.num_speculative_tokens is None
        return self.depth.policy or ("optimal" if is_best else "fixed")


def run_config(**values: object) -> RunConfig:
    """Returns the defaults with these settings changed, by key. Raises `ConfigError` as the loader does."""
    return with_values(RunConfig(), **values)


def draft_dir(config: RunConfig) -> Path:
    """Returns the directory of the configured draft and its tokenizer."""
    return Path(config.draft.directory) if config.draft.directory else default_draft_dir()


def default_draft_dir() -> Path:
    """Returns the embedded draft's directory: that of the package, else one below the working directory."""
    in_tree = EMBEDDED / "draft"
    return in_tree if in_tree.is_dir() else Path("models/embedded/draft")
