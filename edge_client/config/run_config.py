"""The edge's configuration: one frozen dataclass in sections, which flags, YAML keys and variables come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.common.config.loader import option, section, with_values
from outrider.edge_client.config.daemon import DaemonConfig
from outrider.edge_client.config.draft_sections import (
    DepthConfig,
    DraftConfig,
    GateConfig,
    PipeliningConfig,
)
from outrider.edge_client.config.link_sections import ConnectionConfig, LogConfig, OutageConfig
from outrider.edge_client.config.text_sections import SamplingConfig, StopConfig, VerificationConfig
from outrider.edge_client.core.options import REQUESTABLE_MODES, ExecutionMode
from outrider.models import EMBEDDED

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
        ExecutionMode.SPECULATIVE,
        "draft here and verify in the cloud (speculative); decode in the cloud without a draft (cloud-only); "
        "draft and verify in the cloud (co-located); draft here, unverified (edge-only); or change between "
        "speculative, pipelined or not, and cloud-only by measured speed (auto). cloud-only and co-located "
        "need only the tokenizer.json of --draft DIR",
        choices=REQUESTABLE_MODES,
        title=_WORK,
    )
    pipelining: PipeliningConfig = section(PipeliningConfig, title=_WORK)
    max_new_tokens: int = option(256, "most tokens to generate", metavar="N", minimum=1, title=_END)
    depth: DepthConfig = section(DepthConfig, title=_WORK)
    gate: GateConfig = section(GateConfig, "gate_", "gate")
    sampling: SamplingConfig = section(SamplingConfig, title=_SAMPLING)
    stop: StopConfig = section(StopConfig, title=_END)
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
