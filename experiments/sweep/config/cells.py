"""From axes to cells: every combination that makes sense, the baselines of each setting, and the A/A twin."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.common.errors import ConfigError
from outrider.common.types import Method
from outrider.edge_client.config.methods import METHODS_OF
from outrider.edge_client.config.tree import why_no_tree
from outrider.edge_client.controller.depth.fixed import DEFAULT_DEPTH
from outrider.edge_client.core.options import ExecutionMode
from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.sweep.config.schema import MIN_REPEATS, SweepConfig, Variant
from outrider.experiments.sweep.config.settings import is_way, make_edge_config
from outrider.experiments.sweep.results.records import BASELINES, NO_LINK

_PLAIN = Variant()
_ALONE = LinkProfile(name=NO_LINK)  # what edge-only crosses


@dataclass(frozen=True, slots=True)
class Cell:
    """Describes one thing to run. Equal ids mean equal work."""

    link: LinkProfile
    mode: str
    depth_policy: str
    num_speculative_tokens: int | None
    method: str
    tls: bool
    temperature: float
    num_sessions: int
    min_forward_ms: float
    min_draft_ms: float
    tree: str | int = "off"
    variant: Variant = field(default_factory=Variant)
    constraint: Variant = field(default_factory=Variant)
    baseline: str = ""
    twin: str = ""

    @property
    def id(self) -> str:
        """Returns a readable name, unique in a sweep; what is usual is left out."""
        parts = [self.link.name, self.mode]
        if isinstance(self.tree, int):
            parts.append(f"tree-{self.tree}")
        elif self.has_depth:
            length = "" if self.num_speculative_tokens is None else f"-{self.num_speculative_tokens}"
            parts.append(f"{self.depth_policy}{length}")
        parts += ["tree-auto"] if self.tree == "auto" else []
        parts += [self.method] if self.method != Method.COUPLED else []
        parts.append(f"T{self.temperature:g}")
        parts += [f"x{self.num_sessions}"] if self.num_sessions > 1 else []
        parts += [f"forward{self.min_forward_ms:g}"] if self.min_forward_ms else []
        parts += [f"draft{self.min_draft_ms:g}"] if self.min_draft_ms else []
        parts += ["tls"] if self.tls else []
        parts += [self.constraint.name] if self.constraint.name else []
        parts += [self.variant.name] if self.variant.name else []
        parts += ["again"] if self.twin else []
        return " ".join(parts).replace("/", "-")

    @property
    def has_depth(self) -> bool:
        """Returns whether a draft length applies."""
        return self.mode not in (ExecutionMode.CLOUD_ONLY, ExecutionMode.EDGE_ONLY)

    @property
    def has_link(self) -> bool:
        """Returns whether the cell sends anything."""
        return self.mode != ExecutionMode.EDGE_ONLY

    @property
    def is_exact_text(self) -> bool:
        """Returns whether its tokens must be cloud-only's: with `coupled` always, with other exact methods
        greedy."""
        if self.mode == ExecutionMode.EDGE_ONLY:
            return False
        method = Method(self.method)
        return method is Method.COUPLED or (method.is_exact and self.temperature == 0)

    def edge_settings(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Returns settings of `edge-client run`; those of other methods than its own do not concern it."""
        settings = {**common, **self.constraint.edge, **self.variant.edge}
        others = {key for key, methods in METHODS_OF.items() if self.method not in methods}
        others |= {"logprobs"} if self.mode == ExecutionMode.EDGE_ONLY else set()
        settings = {key: value for key, value in settings.items() if key not in others}
        # A cell's rounds are pipelined where its variant says so; only `auto` is to choose.
        pipeline = "auto" if self.mode == ExecutionMode.AUTO else "off"
        return {"pipeline": pipeline, **settings} | {
            "mode": self.mode,
            "depth_policy": self.depth_policy,
            "num_speculative_tokens": self.num_speculative_tokens,
            "tree": self.tree,
            "method": self.method,
            "temperature": self.temperature,
            "min_draft_ms": self.min_draft_ms,
        }

    def run_settings(self, config: SweepConfig) -> dict[str, Any]:
        """Returns all settings of `edge-client run` but which verifier it dials, and what that wants to
        let it in."""
        settings = self.edge_settings(config.edge_settings) | {"max_new_tokens": config.max_new_tokens}
        return settings | {key: value for key, value in config.model_dirs.items() if key == "draft"}

    def labels(self, config: SweepConfig) -> list[str]:
        """Returns what a reader must know beside the figures."""
        labels = ["synthetic"] if config.is_synthetic else []
        labels += [f"no {kind} baseline" for kind in BASELINES if kind not in config.baselines]
        labels += [f"{config.repeats} repeats"] if config.repeats < MIN_REPEATS else []
        labels += [f"min-forward-ms={self.min_forward_ms:g}"] if self.min_forward_ms else []
        labels += [f"min-draft-ms={self.min_draft_ms:g}"] if self.min_draft_ms else []
        if self.mode == ExecutionMode.CO_LOCATED and any(config.min_draft_ms):
            labels.append("its draft is not slowed")
        return labels


def make_cells(config: SweepConfig) -> list[Cell]:
    """Returns baselines first, then what is asked for, each piece of work once; the A/A twin last. Raises
    `ConfigError` where a variant's name makes two cells one."""
    cells: dict[str, Cell] = {}
    for cell in (*_baselines(config), *_asked(config)):
        known = cells.setdefault(cell.id, cell)
        if dataclasses.replace(cell, baseline=known.baseline) != known:
            raise _same_name(cell)
    found = list(cells.values())
    if config.a_a:
        found.append(_twin(found))
        if found[-1].id in cells:
            raise _same_name(found[-1])
    return found


def _same_name(cell: Cell) -> ConfigError:
    return ConfigError(
        f"variants: two cells would be called {cell.id!r}; give a variant or a constraint another name"
    )


def _baseline_of(cell: Cell, kind: str) -> dict[str, object]:
    """Returns the fields that a baseline of this kind must share with `cell`: those that concern the
    baseline."""
    shared: dict[str, object] = {"temperature": cell.temperature, "num_sessions": cell.num_sessions}
    shared["constraint"] = cell.constraint
    if kind != "edge-only":
        shared |= {"link": cell.link, "tls": cell.tls, "min_forward_ms": cell.min_forward_ms}
    if kind in ("edge-only", "fixed"):
        shared |= {"min_draft_ms": cell.min_draft_ms}
    return shared


def find_baselines(cell: Cell, kind: str, cells: list[Cell]) -> list[Cell]:
    """Returns all baselines of this kind in the setting of `cell`: one for each draft length where it has
    some."""
    shared = _baseline_of(cell, kind)
    return [
        each
        for each in cells
        if each.baseline == kind and all(getattr(each, key) == value for key, value in shared.items())
    ]


def _asked(config: SweepConfig) -> Iterator[Cell]:
    axes = itertools.product(
        _settings(config), config.modes, config.policies, config.draft_lengths, config.trees, config.methods
    )
    for setting, mode, policy, length, tree, method in axes:
        for variant in config.variant_list:
            if not variant.modes or mode in variant.modes:
                yield _sensible(setting, mode, policy, length, tree, method, variant)


def _baselines(config: SweepConfig) -> Iterator[Cell]:
    for setting in _settings(config):
        for kind in BASELINES:
            if kind not in config.baselines:
                continue
            mode = ExecutionMode.SPECULATIVE if kind == "fixed" else ExecutionMode(kind)
            for length in config.baseline_draft_lengths:
                cell = _sensible(setting, mode, "fixed", length, "off", Method.COUPLED, _PLAIN)
                yield dataclasses.replace(cell, baseline=kind)


def _settings(config: SweepConfig) -> Iterator[dict[str, Any]]:
    axes = itertools.product(
        config.profiles,
        config.tls,
        config.temperatures,
        config.sessions,
        config.min_forward_ms,
        config.min_draft_ms,
        config.constraint_list,
    )
    names = ("link", "tls", "temperature", "num_sessions", "min_forward_ms", "min_draft_ms", "constraint")
    for values in axes:
        yield dict(zip(names, values, strict=True))


def _sensible(
    setting: Mapping[str, Any],
    mode: str,
    policy: str,
    length: int | None,
    tree: str | int,
    method: str,
    variant: Variant,
) -> Cell:
    """Sets what does not concern the cell's mode to one value, so that equal work is one cell."""
    setting = dict(setting)
    if mode == ExecutionMode.EDGE_ONLY:  # no link, no verifier, and nobody to judge a draft
        setting |= {"link": _ALONE, "tls": False, "min_forward_ms": 0.0}
    if mode in (ExecutionMode.CLOUD_ONLY, ExecutionMode.CO_LOCATED):  # the edge's draft has no part in it
        setting |= {"min_draft_ms": 0.0}
    if mode in (
        ExecutionMode.CLOUD_ONLY,
        ExecutionMode.EDGE_ONLY,
    ):  # alone, a draft gives each token as it comes
        length = 1 if mode == ExecutionMode.EDGE_ONLY else None
        policy, method, variant = "fixed", Method.COUPLED, _PLAIN
    if (
        mode == ExecutionMode.CO_LOCATED
    ):  # one length for the whole text: no policy hears of its rounds in time
        policy = "fixed"
        variant = _PLAIN if all(map(is_way, variant.edge)) else variant
    if not _may_draft_trees(mode, tree, method, variant):
        tree = "off"
    is_shaped = "tree_shape" in variant.edge and not isinstance(tree, int)
    if is_shaped or (tree == "off" and any(key.startswith("tree_") for key in variant.edge)):
        variant = _PLAIN
    if isinstance(tree, int):  # in place of a draft length
        policy, length = "fixed", None
    elif policy != "fixed":  # it finds the length by itself
        length = None
    elif length is None and mode not in (ExecutionMode.CLOUD_ONLY, ExecutionMode.EDGE_ONLY):
        length = DEFAULT_DEPTH
    if any(method not in METHODS_OF.get(key, (method,)) for key in variant.edge):
        variant = _PLAIN
    return Cell(
        mode=str(mode),
        depth_policy=policy,
        num_speculative_tokens=length,
        tree=tree,
        method=str(method),
        variant=variant,
        **setting,
    )


def _may_draft_trees(mode: str, tree: str | int, method: str, variant: Variant) -> bool:
    """Returns whether `edge-client run` takes `--tree` with the rest."""
    if tree == "off":
        return False
    settings = {key: value for key, value in variant.edge.items() if method in METHODS_OF.get(key, (method,))}
    config = make_edge_config({**settings, "mode": mode, "method": method, "tree": tree})
    return not why_no_tree(config)


def _twin(cells: list[Cell]) -> Cell:
    ours = [cell for cell in cells if cell.has_link and ExecutionMode(cell.mode).has_draft] or cells
    asked = [cell for cell in ours if not cell.baseline] or ours
    return dataclasses.replace(asked[0], baseline="", twin=asked[0].id)
