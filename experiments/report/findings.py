"""Sentences about where something holds along an axis, true by construction. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from outrider.experiments.report.numbers import listed, plain, spread
from outrider.experiments.report.verdicts import Relation

Curve = Mapping[float, float]


def standings(outcomes: Mapping[str, Mapping[float, Relation]], hero: str, axis: str, unit: str) -> list[str]:
    """Returns what can be said of the hero against each rival along `axis`: losses, then draws, then wins.

    `outcomes` are the hero's, by rival and place. "co-located beats speculation at every RTT measured (1 to
    600 ms)"; "speculation beats cloud-only up to 60 ms RTT". Empty where nothing was compared.
    """
    lost, even, won = [], [], []
    for rival, by_place in outcomes.items():
        known = {place: result for place, result in by_place.items() if result is not Relation.UNKNOWN}
        worse = _places(known, Relation.WORSE)
        better = _places(known, Relation.BETTER)
        if worse:
            lost.append(f"{rival} beats {hero} {_where(worse, sorted(known), axis, unit)}")
        if better:
            won.append(f"{hero} beats {rival} {_where(better, sorted(known), axis, unit)}")
        if known and not worse and not better:
            where = _where(sorted(known), sorted(known), axis, unit)
            even.append(f"{hero} and {rival} cannot be told apart {where}")
    return [*lost, *even, *won]


def _places(results: Mapping[float, Relation], wanted: Relation) -> list[float]:
    return sorted(place for place, result in results.items() if result is wanted)


def _where(some: Sequence[float], known: Sequence[float], axis: str, unit: str) -> str:
    """Describes `some` of the ascending places `known`: a beginning, an end, all, or the places
    themselves."""
    rest = [place for place in known if place not in some]
    if not rest and len(some) > 1:
        return f"at every {axis} measured ({spread(some, unit)})"
    if len(some) > 1 and some[-1] < rest[0]:
        return f"up to {plain(some[-1])} {unit} {axis}"
    if len(some) > 1 and some[0] > rest[-1]:
        return f"from {plain(some[0])} {unit} {axis} on"
    return f"at {listed([plain(place) for place in some])} {unit} {axis}"


def crossing(lower: Curve, upper: Curve) -> float | None:
    """Returns where `lower` rises past `upper`, by straight lines between the places that both have.

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
    """Joins parts by "; " and capitalises the first letter."""
    text = "; ".join(part for part in parts if part)
    return text[:1].upper() + text[1:]
