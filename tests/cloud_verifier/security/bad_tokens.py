"""What a client could send for a token and is none."""

from __future__ import annotations

import random
import string


def malformed(rng: random.Random, valid: str) -> str | bytes:
    """Something that is no valid token, from noise to a valid one with something wrong."""
    alphabet = string.ascii_letters + string.digits + "_-=+/.~ \t\n\0é\ud800"
    noise = "".join(rng.choice(alphabet) for _ in range(rng.randrange(120)))
    cut = rng.randrange(len(valid))
    digest = f"{rng.getrandbits(256):064x}"
    kinds = [
        noise,
        "Bearer " + noise,
        "Bearer " + valid[:cut],
        "Bearer " + valid[:cut] + rng.choice(alphabet) + valid[cut:],
        "Bearer " + valid[:cut] + valid[cut:].swapcase() + "_",
        f"Basic {valid}",
        valid,
        f"Bearer  {valid}",
        f"Bearer\t{valid}",
        f"Bearer {valid[:21]}{digest[:43]}",
        f"Bearer outrider_{digest[:12]}_{digest[:43]}",
        f"Bearer outrider_{digest[:12]}_{valid[-43:]}",
        f"Bearer {valid},Bearer {valid}",
        f"Bearer {digest}",
        "Bearer " + valid.replace("_", rng.choice("-\u2017 .")),
        f"Bearer {valid}".encode(),
        "Bearer " + "A" * rng.randrange(1000, 100_000),
        "Bearer " + valid[:-1] + chr(ord(valid[-1]) + 0x10000),
    ]
    return rng.choice(kinds)
