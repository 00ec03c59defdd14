"""What a round costs beyond the two models' time, beside a bare gRPC echo of the same bytes with the same pauses.

Every prompt is decoded, its rounds are echoed, and both once more for the A/A ratios. The models' times are of the
same rounds: the draft's runs in onnxruntime, and the forward as the verifier reports it, on one thread.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.real.echo import EchoClient, Exchange, start_echo
from benchmarks.results_file import Found
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel, import_onnxruntime
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.edge_client.transport.link.stream import FRAME_BYTES
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.processes import running_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.shared.results import at_most, judged
from outrider.models import EMBEDDED

NUM_PROMPTS, NUM_NEW = 12, 96
DEPTH = 4
TEMPERATURES = (0.0, 0.8)
TARGET_BYTES = 62_000_000  # the embedded pair's weights in memory
DRAFT_BYTES = 2_200_000
NUM_WARM = 2  # rounds of a session
NUM_THREADS = "1"  # of a forward, as of the server's pause: the edge has a core of its own, as on a device


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Takes a round apart, from the tokens of the one before it to its own; ms."""

    wall: float
    runs: float  # of the draft, in onnxruntime
    drafting: float  # all of the drafting
    forward: float
    verifier: float  # from the arrival to the answer
    waiting: float  # from the sending to the answer's arrival
    bytes_up: int
    bytes_down: int

    @property
    def beyond(self) -> float:
        """Returns what is neither the draft's runs nor the forward."""
        return self.wall - self.runs - self.forward

    @property
    def parts(self) -> dict[str, float]:
        """Returns what `beyond` consists of."""
        return {
            "drafting beyond the runs": self.drafting - self.runs,
            "messages": self.waiting - self.verifier,
            "verifier beyond the forward": self.verifier - self.forward,
            "edge, the rest": self.wall - self.drafting - self.waiting,
        }

    @property
    def exchange(self) -> Exchange:
        """Returns the echo of the round."""
        sizes = self.bytes_up - FRAME_BYTES, self.bytes_down - FRAME_BYTES
        return Exchange(*sizes, int(self.runs * 1e6), int(self.forward * 1e6))


class RunTimes:
    """Times the draft's runs while `recording`."""

    def __init__(self) -> None:
        self._starts_ns: list[int] = []
        self._until_ns = [0]  # all runs before the one of the same index together

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Times the runs inside."""
        session_type = import_onnxruntime().InferenceSession
        run = session_type.run_with_iobinding

        def timed(*arguments: Any) -> None:
            start_ns = time.perf_counter_ns()
            run(*arguments)
            self._starts_ns.append(start_ns)
            self._until_ns.append(self._until_ns[-1] + time.perf_counter_ns() - start_ns)

        with mock.patch.object(session_type, "run_with_iobinding", timed):
            yield

    def between_ms(self, start_ns: int, end_ns: int) -> float:
        """Returns the time of the runs that began between two moments."""
        first, last = (bisect_left(self._starts_ns, each) for each in (start_ns, end_ns))
        return (self._until_ns[last] - self._until_ns[first]) / 1e6


def round_times(result: SessionResult, runs: RunTimes) -> list[RoundTimes]:
    """Returns the times of the rounds of `DEPTH` tokens that brought all of their tokens into the text, but for
    the first ones."""
    found, index, times_ns = [], 0, result.stats.token_times_ns
    for record in result.stats.rounds:
        last_ns, index = times_ns[index], index + record.num_accepted_tokens + 1
        if index >= len(times_ns):
            break
        if record.num_draft_tokens == DEPTH:
            wall_ms = (times_ns[index] - last_ns) / 1e6
            runs_ms = runs.between_ms(last_ns, times_ns[index])
            sizes = record.bytes_up, record.bytes_down
            inside = record.draft_ms, record.forward_ms, record.verifier_ms, record.rtt_ms
            found.append(RoundTimes(wall_ms, runs_ms, *inside, *sizes))
    return found[NUM_WARM:]


def run(num_prompts: int = NUM_PROMPTS) -> Found:
    """Returns the ratio of the medians, greedy and sampled rounds together."""
    rounds: dict[float, list[list[RoundTimes]]] = {each: [[], []] for each in TEMPERATURES}
    echoes: list[list[float]] = [[], []]
    runs, echo = RunTimes(), start_echo(TARGET_BYTES)
    with (
        contextlib.ExitStack() as stack,
        running_verifier("--log-level", "warning", "--num-threads", NUM_THREADS) as verifier,
        OnnxDraftModel.open(EMBEDDED / "draft") as draft,
        runs.recording(),
    ):
        stack.callback(echo.stop)
        client = EchoClient(echo.address, DRAFT_BYTES)
        stack.callback(client.close)
        decoder = Decoder(verifier.address, draft, EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json"))
        for number, prompt in enumerate(load_prompts(limit=num_prompts)):
            for temperature in TEMPERATURES:
                case, texts = Case(ExecutionMode.SPECULATIVE, temperature, DEPTH), []
                for again in (0, 1):
                    result = decoder.decode(prompt.text, case, NUM_NEW)
                    texts.append(result.token_ids)
                    its_rounds = round_times(result, runs)
                    beyond_ms = client.beyond_ms(each.exchange for each in its_rounds)
                    if number:  # the first warms up
                        rounds[temperature][again] += its_rounds
                        echoes[again] += beyond_ms
                assert texts[0] == texts[1], f"two texts of {prompt.id} differ"
    return report(rounds, echoes)


def report(rounds: dict[float, list[list[RoundTimes]]], echoes: Sequence[Sequence[float]]) -> Found:
    """Returns the measure and its parts, of `rounds` by temperature and turn and `echoes` by turn."""
    turns = [[each for found in rounds.values() for each in found[again]] for again in (0, 1)]
    beyond_ms, echo_ms = _median_beyond([*turns[0], *turns[1]]), statistics.median([*echoes[0], *echoes[1]])
    what = "a round beyond the two models' time : a bare gRPC echo of the same bytes and pauses, medians"
    details: dict[str, Any] = {
        "beyond_ms": round(beyond_ms, 3),
        "echo_ms": round(echo_ms, 3),
        "beyond_a_a": round(_median_beyond(turns[0]) / _median_beyond(turns[1]), 3),
        "echo_a_a": round(statistics.median(echoes[0]) / statistics.median(echoes[1]), 3),
        "num_rounds": sum(map(len, turns)),
        "by_temperature": {str(t): _parts_ms([*found[0], *found[1]]) for t, found in rounds.items()},
    }
    return [judged("real.overhead", what, beyond_ms / echo_ms, "ratio", at_most(2.5))], details


def _median_beyond(rounds: Sequence[RoundTimes]) -> float:
    return statistics.median(each.beyond for each in rounds)


def _parts_ms(rounds: Sequence[RoundTimes]) -> dict[str, float]:
    """Returns medians."""
    named = {"beyond": [each.beyond for each in rounds]}
    named |= {"forward": [each.forward for each in rounds], "runs": [each.runs for each in rounds]}
    named |= {name: [each.parts[name] for each in rounds] for name in rounds[0].parts}
    return {name: round(statistics.median(values), 3) for name, values in named.items()}
