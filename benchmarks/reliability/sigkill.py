"""`rel.sigkill`: the verifier is killed at random moments of texts, and comes back each time."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.reliability.setup import QUIET, Settings, mortal_verifier
from benchmarks.reliability.texts import HANDLINGS, Judged, Workers, faulty_texts, random_moments
from benchmarks.results_file import Found
from outrider.experiments.shared.results import at_most, judged

KILLS_A_REPORT = 10
LONGEST_LIFE_S = 2.0


def run(settings: Settings) -> Iterator[Found]:
    """Yields what was found so far, every few kills."""
    num_kills = settings.pick(500, 24, 1)
    with (
        mortal_verifier("serve", *QUIET, "--device", "cpu", "--min-forward-ms", "10") as verifier,
        faulty_texts(verifier.address, settings.pick(12, 4, 1)) as texts,
    ):
        decoder = texts.decoder(verifier.address)
        workers = Workers(settings.pick(6, 6, 3), lambda number: texts.run(decoder, number, "killed"))
        for life_s in random_moments(1, num_kills, LONGEST_LIFE_S):
            time.sleep(0.3 + life_s)
            verifier.kill()
            verifier.revive()
            if verifier.num_kills % KILLS_A_REPORT == 0:
                settings.say(
                    f"{verifier.num_kills} kills: {dict(texts.judged.num_texts)}, {_wrong(texts.judged)}"
                )
                yield _found(texts.judged, verifier.num_kills)
        workers.stop()
        settings.say(f"{verifier.num_kills} kills: {_wrong(texts.judged)} {dict(texts.judged.happened)}")
        yield _found(texts.judged, verifier.num_kills)


def _wrong(found: Judged) -> str:
    return f"{len(found.different)} different, {found.num_unmarked} unmarked"


def _found(found: Judged, num_kills: int) -> Found:
    measure = judged(
        "rel.sigkill",
        f"texts at wait that differ, of {found.num_texts['wait']}, in {num_kills} SIGKILLs of the verifier; of "
        f"{found.num_texts.total()} texts {len(HANDLINGS)} ways in turn, {found.num_ties} ties, "
        f"{found.num_unmarked} unverified tokens without a mark",
        len(found.different) + found.num_unmarked,
        "texts",
        at_most(0),
    )
    return [measure], {"num_kills": num_kills, **found.details()}
