"""Sentences about where something holds along an axis, true by construction. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from experiments.report.numbers import listed, plain, spread
from experiments.report.verdicts import Outcome

Curve = Mapping[float, float]


def reach(outcomes: Mapping[float, Outcome], hero: str, rival: str, axis: str, unit: str) -> str:
    """Where along `axis` the hero beats the rival: "speculation beats cloud-only up to 60 ms RTT".

    `outcomes` are the hero's, by place; "" where nothing was compared.
    """
    known = {place: result for place, result in outcomes.items() if result is not Outcome.UNKNOWN}
    if not known:
        return ""
    everywhere = f"at every {axis} measured ({spread(list(known), unit)})"
    if len(known) == 1:
        everywhere = f"at {spread(list(known), unit)} {axis}"
    better = sorted(place for place, result in known.items() if result is Outcome.BETTER)
    worse = [place for place, result in known.items() if result is Outcome.WORSE]
    if len(worse) == len(known):
        return f"{rival} beats {hero} {everywhere}"
    if len(better) == len(known):
        return f"{hero} beats {rival} {everywhere}"
    if not better and not worse:
        return f"{hero} and {rival} cannot be told apart {everywhere}"
    if not better:
        return f"{hero} beats {rival} at no {axis} measured ({spread(list(known), unit)})"
    return f"{hero} beats {rival} {_where(better, sorted(known), axis, unit)}"


def _where(better: Sequence[float], known: Sequence[float], axis: str, unit: str) -> str:
    rest = [place for place in known if place not in better]
    if better[-1] < rest[0]:
        return f"up to {plain(better[-1])} {unit} {axis}"
    if better[0] > rest[-1]:
        return f"from {plain(better[0])} {unit} {axis} on"
    return f"at {listed([plain(place) for place in better])} {unit} {axis} only"


def crossing(lower: Curve, upper: Curve) -> float | None:
    """Where `lower` rises past `upper`, by straight lines between the places that both have.

    None where it does not, or does more than once.
    """
    places = sorted(lower.keys() & upper.keys())
    found = []
    for left, right in itertools.pairwise(places):
        before, after = lower[left] - upper[left], lower[right] - upper[right]
        if (before < 0) != (after < 0):
            if before >= 0:
                return None  # it falls past the other: no single break-even
            found.append(left + (right - left) * -before / (after - before))
    return found[0] if len(found) == 1 else None


def sentence(parts: Sequence[str]) -> str:
    """Parts joined by "; ", the first letter large."""
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:]
