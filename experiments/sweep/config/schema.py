"""Defines every key of a sweep with its default."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.common.config.loader import option
from outrider.experiments.links.profiles import LinkProfile, load_profile
from outrider.experiments.sweep.results.records import BASELINES

# An approximation is asked for, not met by accident; texts of one length compare best.
_EDGE_DEFAULTS = {"on_timeout": "wait", "ignore_eos": True}
DIRECT, SIMULATED = "direct", "simulated"  # no link at all: loopback as it is; no process at all
MIN_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Slo:
    """Says what a request must keep to count as goodput; None: not asked."""

    ttft_ms: float | None = option(1000.0, "first token within this", minimum=0.001)
    tpot_ms: float | None = option(100.0, "time per later token at most this", minimum=0.001)
    commit_gap_p95_ms: float | None = option(None, "95 % of gaps between commits within this", minimum=0.001)


@dataclass(frozen=True, slots=True)
class Variant:
    """Holds settings of `edge-client run` that some cells have beside the common ones: of all modes, or of
    some."""

    name: str = ""
    edge: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    modes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Configures `edge-client bench`. The lists are axes: every combination that makes sense is a cell."""

    name: str = option("sweep", "title of the results")
    links: tuple[Any, ...] = option(("loopback",), "named profiles, or mappings of a profile's fields")
    realisation: str = option("proxy", "how links are made: direct (none), proxy, tun, netem, simulated")
    modes: tuple[str, ...] = option(("speculative",), "of edge-client run --mode")
    policies: tuple[str, ...] = option(("fixed",), "of --depth-policy")
    draft_lengths: tuple[int | None, ...] = option((None,), "of --num-speculative-tokens; null: the policy's")
    trees: tuple[Literal["auto", "off"] | int, ...] = option(
        ("off",), "of --tree: off, auto, or a number of nodes, in place of draft lengths", minimum=1
    )
    methods: tuple[str, ...] = option(("coupled",), "of --method")
    tls: tuple[bool, ...] = option((False,), "encryption between edge and verifier")
    temperatures: tuple[float, ...] = option((0.8,), "0 is greedy", minimum=0.0)
    sessions: tuple[int, ...] = option((1,), "edges at once, each a process", minimum=1, maximum=256)
    min_forward_ms: tuple[float, ...] = option((0.0,), "slow-down of the target", minimum=0.0)
    min_draft_ms: tuple[float, ...] = option((0.0,), "slow-down of the edge's draft", minimum=0.0)
    constraints: tuple[Any, ...] = option(
        (None,), "grammars of the text, each {name: ..., json_schema, regex or grammar: ...}; null: none"
    )
    variants: tuple[Any, ...] = option((), "further edge settings, each {name: ..., edge: {...}}")
    edge: Any = option(None, "settings of edge-client run for every cell, as in its YAML")
    serve: Any = option(None, "settings of cloud-verifier serve for every verifier started here")
    verifier: str = option("", "a verifier that runs already, HOST:PORT; empty: started here")
    models: Any = option("embedded", "embedded, synthetic, or {target: DIR, draft: DIR}")
    synthetic: Any = option(None, "the synthetic pair's acceptance and times; goes with models: synthetic")
    baselines: tuple[str, ...] = option(BASELINES, "leaving one out is written into the results")
    baseline_draft_lengths: tuple[int, ...] = option((4,), "of fixed and co-located", minimum=1)
    a_a: bool = option(True, "run one cell twice under two names, so that noise is visible")
    prompts: str = option("", "file of prompts; empty: the embedded held-out ones", metavar="FILE")
    num_prompts: int = option(4, "the first so many", minimum=1)
    max_new_tokens: int = option(64, "new tokens of a request at most", minimum=2)
    repeats: int = option(MIN_REPEATS, "how often each cell is visited", minimum=1)
    seed: int = option(1, "repeat r samples with seed + r; also orders the cells", minimum=0)
    slo: Slo = dataclasses.field(default_factory=Slo)
    price_per_hour: float | None = option(None, "of the verifier's machine, for the cost of tokens")
    quality: bool = option(True, "target loss of texts that are not exact; loads the target once, at the end")
    calibrate: bool = option(True, "measure the realisation first, a few seconds, into the manifest")

    @property
    def is_synthetic(self) -> bool:
        """Returns whether the models are synthetic."""
        return bool(self.models == "synthetic")

    @property
    def profiles(self) -> list[LinkProfile]:
        """Returns the links as profiles."""
        return [load_profile(link) for link in self.links]

    @property
    def edge_settings(self) -> dict[str, Any]:
        """Returns the settings of `edge-client run` that all cells share."""
        return {**_EDGE_DEFAULTS, **(self.edge or {})}

    @property
    def constraint_list(self) -> list[Variant]:
        """Returns the constraints, the plain one for null, as settings that all cells of one share. A constrained text
        ends where its grammar does."""
        found = []
        for each in self.constraints:
            settings = {key: value for key, value in (each or {}).items() if key != "name"}
            if isinstance(schema := settings.get("json_schema"), Mapping):
                settings["json_schema"] = json.dumps(schema)
            found.append(Variant(str(each["name"]), settings | {"ignore_eos": False}) if each else Variant())
        return found

    @property
    def variant_list(self) -> list[Variant]:
        """Returns the variants: the plain one unless others were given."""
        found = []
        for each in self.variants:
            modes = each.get("modes") or ()
            named = (modes,) if isinstance(modes, str) else tuple(modes)
            found.append(Variant(str(each.get("name") or ""), each.get("edge") or {}, named))
        return found or [Variant()]

    @property
    def model_dirs(self) -> dict[str, str]:
        """Returns the directories of `target` and `draft`, as far as they were named."""
        return dict(self.models) if isinstance(self.models, Mapping) else {}


def resolved(config: SweepConfig) -> dict[str, Any]:
    """Returns the whole sweep as JSON, links with every field; `load_sweep` of this gives the same sweep."""
    record = dataclasses.asdict(config)
    record["links"] = [link_record(profile) for profile in config.profiles]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in record.items()}


def link_record(profile: LinkProfile) -> dict[str, Any]:
    """Returns a profile as JSON has it."""
    record = dataclasses.asdict(profile)
    return record | {"outages": list(record["outages"])}
