"""Describes a synthetic pair: how likely drafted tokens are accepted, and what its two models take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.common.config.units import parse_duration, parse_share, show_duration
from outrider.common.errors import UsageError
from outrider.edge_client.controller.cost_model import ModelCosts

DEFAULT_ALPHA = 0.8


@dataclass(frozen=True, slots=True)
class SyntheticPair:
    """Describes a pair. `alphas[i]` is the chance that a draft's token i is accepted, given that those before
    it are; the last repeats.

    A forward of the target over m tokens takes target_s + (m - 1) verify_token_s, so that verifying n drafted
    tokens takes target_s + n verify_token_s. Texts and luck are functions of the seed.
    """

    alphas: tuple[float, ...] = (DEFAULT_ALPHA,)
    draft_token_s: float = 0.0
    target_s: float = 0.0
    verify_token_s: float = 0.0
    colocated_draft_token_s: float | None = None  # None: as long as at the edge
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise UsageError(f"alpha {list(self.alphas)}: want one number or several, each between 0 and 1")
        if min(self.draft_token_s, self.target_s, self.verify_token_s, self.colocated_draft_s) < 0:
            raise UsageError("the times of a synthetic pair cannot be negative")

    @property
    def colocated_draft_s(self) -> float:
        """Returns the seconds of a token drafted beside the target."""
        here = self.colocated_draft_token_s
        return self.draft_token_s if here is None else here

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the labels of everything made with the pair."""
        alphas = ",".join(f"{alpha:g}" for alpha in self.alphas)
        draft, target = show_duration(self.draft_token_s), show_duration(self.target_s)
        more = f" + {show_duration(self.verify_token_s)} a token" if self.verify_token_s else ""
        colocated = ""
        if self.colocated_draft_s != self.draft_token_s:
            colocated = f", co-located draft {show_duration(self.colocated_draft_s)}"
        times = f"draft {draft} a token, target {target}{more}{colocated}"
        return ("synthetic", f"synthetic acceptance {alphas}, {times}")

    @property
    def costs(self) -> ModelCosts:
        """Returns the pair's costs for the cost model."""
        return ModelCosts(
            draft_token_s=self.draft_token_s,
            target_token_s=self.target_s,
            verify_fixed_s=self.target_s,
            verify_token_s=self.verify_token_s,
            colocated_draft_token_s=self.colocated_draft_token_s,
        )

    def flags(self) -> list[str]:
        """Returns the flags of `python -m outrider.experiments.synthetic.serve`."""
        flags = ["--alpha", ",".join(map(repr, self.alphas)), "--synthetic-seed", str(self.seed)]
        times = {"--t-target": self.target_s, "--t-verify-token": self.verify_token_s}
        times["--t-draft"] = self.colocated_draft_s
        for flag, seconds in times.items():
            flags += [flag, f"{seconds * 1e6:.3f}us"]
        return flags


def parse_alphas(text: str, flag: str) -> tuple[float, ...]:
    """Returns the chances of "0.8", or of "0.9,0.8,0.7" by position. Raises `UsageError` naming `flag`."""
    return tuple(parse_share(part.strip(), flag) for part in text.split(","))


def pair_from(mapping: Mapping[str, object]) -> SyntheticPair:
    """Returns a pair from YAML: alpha (a number or a list), t_draft, t_target, t_verify_token,
    t_draft_colocated ("10ms"), seed; all may be left out. Raises `UsageError` naming the key."""
    known = {
        "t_draft": "draft_token_s",
        "t_target": "target_s",
        "t_verify_token": "verify_token_s",
        "t_draft_colocated": "colocated_draft_token_s",
    }
    values: dict[str, object] = {}
    for key, value in mapping.items():
        if key == "alpha":
            parts = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
            values["alphas"] = parse_alphas(",".join(map(str, parts)), key)
        elif key == "seed" and isinstance(value, int):
            values["seed"] = value
        elif key in known:
            values[known[key]] = parse_duration(str(value), key)
        else:
            raise UsageError(f"synthetic: {key}: {value!r} is not among alpha, seed, {', '.join(known)}")
    return SyntheticPair(**values)  # type: ignore[arg-type]
