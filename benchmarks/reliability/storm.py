"""`rel.storm`: a verifier is killed under 200 live sessions and comes back.

Compared are the time from when it serves until every session has a new token, and the time that computing their
sequences takes by itself: the same openings at once on a verifier that has nothing else to do.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence

from benchmarks.reliability.edges import Crowd, CrowdProcesses, EdgeLog
from benchmarks.reliability.setup import QUIET, Settings, mortal_verifier
from benchmarks.results_file import Found
from outrider.experiments.load.cloud import CloudStream
from outrider.experiments.load.wire import connect
from outrider.experiments.shared.results import at_most, judged
from outrider.experiments.synthetic.keyed import FIRST_TOKEN, NUM_TOKENS
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import running_synthetic

PAIR = SyntheticPair(target_s=0.03, verify_token_s=0.0005)
NUM_SESSIONS = 200
PROMPT_TOKENS = 128
DOWN_S = 2.0


def run(settings: Settings) -> Iterator[Found]:
    """Measures one storm."""
    num_sessions = settings.pick(NUM_SESSIONS, 60, 8)
    ramp_s, settle_s = num_sessions / 10, settings.pick(15.0, 8.0, 3.0)
    grace_s = settings.pick(90.0, 30.0, 5.0)  # for a start and for everybody's prefill, twice
    module = "outrider.experiments.synthetic.serve"
    crowd = Crowd(num_sessions, settle_s + DOWN_S + grace_s, ramp_s, PROMPT_TOKENS)
    with mortal_verifier(*PAIR.flags(), *QUIET, module=module) as verifier:
        processes = CrowdProcesses(verifier.address, crowd)
        time.sleep(ramp_s + settle_s)
        killed_s = time.monotonic()
        verifier.kill()
        time.sleep(DOWN_S)
        served_s = verifier.revive()
        settings.say(f"down for {served_s - killed_s:.1f} s under {num_sessions} sessions")
        logs = processes.logs()
    back_s = [_first_token_after(log, served_s) - served_s for log in logs]
    lengths = [PROMPT_TOKENS + sum(token_s < killed_s for token_s in log.token_s) for log in logs]
    alone_s = _prefill_alone_s(lengths)
    refused = sum(bool(log.error) or math.isinf(back) for log, back in zip(logs, back_s, strict=True))
    last_s = max((back for back in back_s if back < math.inf), default=math.inf)
    settings.say(f"all back after {last_s:.1f} s, the prefill alone takes {alone_s:.1f} s; {refused} lost")
    measure = judged(
        "rel.storm",
        f"restart under {num_sessions} sessions of {sum(lengths)} tokens: until all generate again "
        f"({last_s:.1f} s) : their prefill by itself ({alone_s:.1f} s); {refused} refused for good",
        last_s / alone_s,
        "ratio",
        ("<= 2; 0 refused", lambda ratio: at_most(2.0)[1](ratio) and not refused),
    )
    details = {
        "back_s": sorted(round(each, 2) for each in back_s),
        "errors": [log.error for log in logs if log.error],
        "alone_s": alone_s,
    }
    yield [measure], details


def _first_token_after(log: EdgeLog, moment_s: float) -> float:
    return next((token_s for token_s in log.token_s if token_s > moment_s), math.inf)


def _prefill_alone_s(lengths: Sequence[int]) -> float:
    """Returns the seconds in which a fresh verifier opens sequences of these lengths."""

    async def open_all(address: str) -> float:
        connection = await connect(address)
        streams = [
            CloudStream(connection, [FIRST_TOKEN + (number * 7 + i) % NUM_TOKENS for i in range(length)])
            for number, length in enumerate(lengths)
        ]
        begin_s = time.monotonic()
        await asyncio.gather(*(stream.open() for stream in streams))
        connection.close()
        return time.monotonic() - begin_s

    with running_synthetic(PAIR, *QUIET) as verifier:
        return asyncio.run(open_all(verifier.address))
