"""Maps draft strategies on what there is: drafts of the client, and draft sources of the verifier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.common.errors import ConfigError
from outrider.common.types import EARLY_EXIT, LOOKAHEAD
from outrider.decoder.config import DraftStrategy, SpeculativeConfig
from outrider.edge_client.drafting.registry import MODEL, STRATEGIES
from outrider.models import EMBEDDED, shipped_heads

PROMPT_LOOKUP = "prompt-lookup"


@dataclass(frozen=True, slots=True)
class Site:
    """Says where the target is. Of a remote one there is no directory."""

    target: Path | None
    device: str  # cpu, cuda, ...
    draft_sources: tuple[str, ...] = ()  # of a remote verifier
    kv_dtype: str = ""  # of a remote verifier

    @property
    def is_local(self) -> bool:
        """Returns whether the target is loaded in this process."""
        return self.target is not None


@dataclass(frozen=True, slots=True)
class Source:
    """Says what drafts: the client by `strategy`, else the verifier by `colocated`."""

    strategy: str = ""  # of --draft-strategy
    colocated: str = ""  # of --draft-source
    has_own_kv: bool = False  # a draft model's, kept between texts by the client
    is_on_target_kv: bool = False
    is_fused: bool = False  # drafts from what the verifying forward computed, without a forward of its own
    has_trees: bool = True

    @property
    def is_model(self) -> bool:
        """Returns whether the client drafts with a model."""
        return self.strategy == MODEL

    @property
    def is_trained(self) -> bool:
        """Returns whether it is heads with weights."""
        return self.colocated not in ("", EARLY_EXIT, LOOKAHEAD)


_MODEL = Source(MODEL, has_own_kv=True)
_EARLY_EXIT = Source(colocated=EARLY_EXIT, is_on_target_kv=True, has_trees=False)
_SOURCES = {
    DraftStrategy.SMALL_MODEL: _MODEL,
    DraftStrategy.QUANTIZED: _MODEL,
    DraftStrategy.MEDUSA: Source(colocated="medusa", is_fused=True),
    DraftStrategy.HYDRA: Source(colocated="hydra"),
    DraftStrategy.EAGLE: Source(colocated="eagle", has_own_kv=True),
    DraftStrategy.EARLY_EXIT: _EARLY_EXIT,
    DraftStrategy.LOOKAHEAD: Source(colocated=LOOKAHEAD, is_fused=True),
    DraftStrategy.NGRAM: Source(PROMPT_LOOKUP),
    DraftStrategy.SUFFIX: Source("suffix"),
    DraftStrategy.RETRIEVAL: Source("retrieval"),
    DraftStrategy.STAGED: Source("staged"),
}


def find_source(config: SpeculativeConfig, site: Site) -> Source:
    """Returns what drafts. Raises `ConfigError` for an unknown strategy, and for one that is not there."""
    try:
        strategy = DraftStrategy(config.draft_strategy)
    except ValueError:
        known = ", ".join(DraftStrategy)
        raise ConfigError(f"draft_strategy is {config.draft_strategy!r}", f"want one of {known}") from None
    if strategy is DraftStrategy.PREFIX_LAYERS:
        return _EARLY_EXIT if shares_kv(config, site) else _MODEL
    source = _SOURCES[strategy]
    if source.strategy and source.strategy not in STRATEGIES:
        raise ConfigError(
            f"draft_strategy={str(strategy)!r} is refused: this version has no --draft-strategy {source.strategy}"
        )
    if source.colocated and not site.is_local and source.colocated not in site.draft_sources:
        found = ", ".join(site.draft_sources) or "nothing"
        raise ConfigError(
            f"draft_strategy {strategy}: that verifier drafts with {found}",
            "start it with --lookahead" if source.colocated == LOOKAHEAD else "start it with --heads DIR",
        )
    return source


def shares_kv(config: SpeculativeConfig, site: Site) -> bool:
    """Returns whether first layers draft on the target's own KV: where asked to and the target can."""
    can = site.device == "cpu" if site.is_local else EARLY_EXIT in site.draft_sources
    return config.share_kv_cache and can


def find_heads(name: str, target: Path) -> Path | None:
    """Returns the directory of the heads of this kind that are shipped for a target; None where there are none."""
    if target.resolve() != (EMBEDDED / "target").resolve():
        return None
    return next((each for each in shipped_heads() if each.name == name), None)
