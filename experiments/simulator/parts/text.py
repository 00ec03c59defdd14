"""The one text that every simulated target writes, and what drafts of it say."""

from __future__ import annotations

import random

LENGTH = 4096  # then it begins again
MASK = LENGTH - 1
NUM_TOKENS = 151_936
FINGERPRINT = "simulated"
_FIRST_ID = 1 << 14  # ids of three bytes on the wire, as nearly all of a large vocabulary
_FIRST_ODD_ID = 140_000  # from here on ids that no text has


def _make_text() -> list[int]:
    source = random.Random(FINGERPRINT)
    return [source.randrange(_FIRST_ID, _FIRST_ODD_ID) for _ in range(LENGTH)]


TEXT = _make_text()
TWICE = TEXT + TEXT  # so that slices need not wrap
WRONG = [_FIRST_ODD_ID + position % 1000 for position in range(LENGTH)]  # what a draft says where it errs
OTHERS = tuple(range(_FIRST_ODD_ID + 1000, _FIRST_ODD_ID + 1100))  # fill the supports of drafts


def prompt_of(num_tokens: int) -> list[int]:
    """Returns the text's first tokens."""
    return [TEXT[position & MASK] for position in range(num_tokens)]


def drafted(position: int, num_drafted: int, num_right: int) -> tuple[int, ...]:
    """Returns a draft after `position` tokens of which the first `num_right` agree with the target and the
    next one does not."""
    start = position & MASK
    right = TWICE[start : start + num_drafted]
    if num_right < num_drafted:
        right[num_right] = WRONG[(start + num_right) & MASK]
    return tuple(right)


def others(position: int, num_ids: int) -> tuple[int, ...]:
    """Returns ids that the text does not have after `position` tokens, nor anywhere."""
    return OTHERS[:num_ids]
