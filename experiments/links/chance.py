"""Draws losses in runs and jitter for packets. Seeded, with a stream of its own for each direction."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from outrider.experiments.links.profile import LinkProfile

# Lomax with this shape has mean scale / (shape - 1) and a finite variance, and one packet in a thousand is
# delayed 18 means.
PARETO_SHAPE = 3.0
PAUSE_S = 0.1  # ends a run of losses: what spoils a radio link passes while nobody sends


def make_random(profile: LinkProfile, is_up: bool, key: str = "") -> random.Random:
    """Returns a source of chance that is the same for the same seed, direction and key, on any machine."""
    return random.Random(f"{profile.seed}/{key}/{'up' if is_up else 'down'}")


def make_jitter(profile: LinkProfile, source: random.Random) -> Callable[[], float]:
    """Draws a packet's extra delay, s; its mean is the profile's."""
    mean_s, draw = profile.jitter_ms / 1000, source.random
    if profile.jitter_distribution == "exponential":
        return lambda: -mean_s * math.log1p(-draw())
    if profile.jitter_distribution == "pareto":
        scale_s, power = mean_s * (PARETO_SHAPE - 1), -1 / PARETO_SHAPE
        return lambda: scale_s * ((1.0 - draw()) ** power - 1.0)
    return lambda: 2 * mean_s * draw()


def make_loss(profile: LinkProfile, source: random.Random) -> Callable[[float], bool]:
    """Says of each packet, by its time, whether it is lost: alone, or in runs by Gilbert's two states.

    In the bad state every packet is lost; it is left with chance 1 / burst and entered with the chance that
    makes the share of lost packets the profile's. A packet that comes a pause after the one before it does
    not know that one's state: else a run would outlast retransmissions seconds apart.
    """
    loss, burst, draw = profile.loss, profile.loss_burst, source.random
    if burst == 1:
        return lambda time_s: draw() < loss
    enter, stay = loss / (burst * (1 - loss)), 1 - 1 / burst
    is_bad, last_s = False, -PAUSE_S

    def is_lost(time_s: float) -> bool:
        nonlocal is_bad, last_s
        chance = loss if time_s - last_s >= PAUSE_S else stay if is_bad else enter
        is_bad = draw() < chance
        last_s = max(last_s, time_s)
        return is_bad

    return is_lost
