"""Settings and arms, and what they are called. Pure.

A *setting* is what cells share to be comparable on one link (realisation, temperature, slow-downs ...); an
*arm* is how tokens are made in it (mode, depth policy, draft length, method).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.common.types import Method
from outrider.experiments.report.numbers import plain
from outrider.experiments.sweep.results.records import BASELINES, NO_LINK, CellRow

CLOUD_ONLY, CO_LOCATED, EDGE_ONLY, FIXED = BASELINES
TPOT, TTFT, OTPS = "tpot_ms", "ttft_ms", "otps"


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Holds what cells share to be comparable on one link."""

    is_synthetic: bool
    realisation: str
    min_forward_ms: float
    min_draft_ms: float
    temperature: float
    num_sessions: int
    tls: bool
    constraint: str = ""

    @classmethod
    def of(cls, cell: CellRow) -> Setting:
        """Returns the setting of a cell."""
        return cls(
            is_synthetic=cell.is_synthetic,
            realisation=cell.realisation,
            min_forward_ms=cell.min_forward_ms,
            min_draft_ms=cell.min_draft_ms,
            temperature=cell.temperature,
            num_sessions=cell.num_sessions,
            tls=cell.tls,
            constraint=cell.constraint,
        )

    def fits(self, cell: CellRow) -> bool:
        """Returns whether a cell belongs here, by what concerns its mode.

        Edge-only has no link and no target; the edge's draft has no part in cloud-only and co-located.
        """
        theirs = Setting.of(cell)
        if cell.realisation == NO_LINK:
            theirs = replace(
                theirs, realisation=self.realisation, min_forward_ms=self.min_forward_ms, tls=self.tls
            )
        if not Arm.of(cell).is_edge_drafting:
            theirs = replace(theirs, min_draft_ms=self.min_draft_ms)
        return theirs == self


@dataclass(frozen=True, slots=True)
class Arm:
    """Holds how tokens are made."""

    mode: str
    depth_policy: str
    num_speculative_tokens: int | None
    method: str
    variant: str
    tree: str | int = "off"

    @classmethod
    def of(cls, cell: CellRow) -> Arm:
        """Returns the arm of a cell."""
        length = cell.num_speculative_tokens
        return cls(cell.mode, cell.depth_policy, length, cell.method, cell.variant, cell.tree)

    @property
    def is_edge_drafting(self) -> bool:
        """Returns whether the draft runs at the edge."""
        return self.mode not in (CLOUD_ONLY, CO_LOCATED)

    @property
    def is_speculation(self) -> bool:
        """Returns whether it speculates over the link: whatever is none of the three other ways to decode."""
        return self.mode not in (CLOUD_ONLY, CO_LOCATED, EDGE_ONLY)

    @property
    def is_exact(self) -> bool:
        """Returns whether its method is exact."""
        return self.method not in list(Method) or Method(self.method).is_exact


def setting_label(setting: Setting, among: Sequence[Setting]) -> str:
    """Returns what distinguishes a setting from the others; empty where there is one alone."""
    words = {
        "is_synthetic": "synthetic" if setting.is_synthetic else "measured",
        "realisation": f"{setting.realisation} link",
        "min_forward_ms": f"target forward at least {plain(setting.min_forward_ms)} ms"
        if setting.min_forward_ms
        else "target as it is",
        "min_draft_ms": f"draft step at least {plain(setting.min_draft_ms)} ms"
        if setting.min_draft_ms
        else "draft as it is",
        "temperature": f"temperature {plain(setting.temperature)}",
        "num_sessions": f"{setting.num_sessions} at once",
        "tls": "TLS" if setting.tls else "no TLS",
        "constraint": f"texts obey {setting.constraint}" if setting.constraint else "free text",
    }
    varying = [name for name in words if len({getattr(each, name) for each in among}) > 1]
    return ", ".join(words[name] for name in varying)


def arm_label(arm: Arm, among: Sequence[Arm]) -> str:
    """Returns the mode, and what distinguishes it from the other arms of its mode."""
    peers = [each for each in among if each.mode == arm.mode]
    n = arm.num_speculative_tokens
    words = {
        "depth_policy": arm.depth_policy,
        "num_speculative_tokens": f"n = {n}" if n is not None else "",
        "tree": tree_words(arm.tree),
        "method": arm.method,
        "variant": arm.variant,
    }
    varying = [name for name in words if len({getattr(each, name) for each in peers}) > 1]
    if isinstance(arm.tree, int) and "depth_policy" in varying:
        varying.remove("depth_policy")  # a tree of a given size has no policy
    told = ", ".join(words[name] for name in varying if words[name])
    return f"{arm.mode} ({told})" if told else arm.mode


def tree_words(tree: str | int) -> str:
    """Returns what rounds draft in place of chains; empty where they are chains."""
    if isinstance(tree, int):
        return f"trees of {tree} tokens"
    return "trees where faster" if tree == "auto" else ""


def link_label(link: Mapping[str, Any]) -> str:
    """Returns the link's name."""
    return str(link.get("name") or NO_LINK)


def outages_of(link: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Returns the beginning and end of each outage, in seconds after the link opened."""
    return [(each["start_s"], each["start_s"] + each["duration_s"]) for each in link.get("outages") or ()]
