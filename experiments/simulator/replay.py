"""Real edges that replay known texts: the product over the real wire, with a draft that only takes its time.

So four edges and a verifier can be timed on two cores: no draft model competes for them, as in
`outrider.experiments.load`. What the drafts propose, and how much of it is accepted, is the real pair's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.common.config.loader import with_values
from outrider.common.types import SamplingParams
from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.core.options import ExecutionMode
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.session.factory import Edge, create_edge
from outrider.edge_client.session.session import SessionResult
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.acceptance_traces import MAX_DEPTH, trace_text
from outrider.experiments.shared.decoding import Case, Decoder
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.simulator.parts.drafts import (
    KnownText,
    TracedDraft,
    TracedSequence,
    TracedText,
    create_sequence,
)
from outrider.experiments.simulator.parts.times import DraftTimes
from outrider.models import EMBEDDED

GREEDY = SamplingParams(temperature=0.0, seed=1)


class ReplayDraft(TracedDraft):
    """Is a `DraftModel` for one known text, in real time."""

    def __init__(self, known: KnownText, times: DraftTimes, model: EdgeTokenizer) -> None:
        super().__init__(times, [known.trace], time.sleep)
        self._known = known
        self.num_tokens = model.num_tokens
        self.tokenizer_fingerprint = model.fingerprint

    def sequence(
        self, sampling: SamplingParams, *, num_prompt_tokens: int | None = None, num_support: int = 0
    ) -> TracedSequence:
        """Returns a sequence of the known text."""
        known = self._known
        num_prompt_tokens = num_prompt_tokens or len(known.prompt_ids)
        return create_sequence(
            self.times, time.sleep, known.trace, num_prompt_tokens, num_support=num_support, words=known
        )


def learn_texts(address: str, num_texts: int, num_positions: int) -> list[KnownText]:
    """Returns texts of the embedded prompts, written by the target at `address`, drafted at each position
    by the embedded draft."""
    tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
    found = []
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        decoder = Decoder(address, draft, tokenizer)
        for prompt in load_prompts(limit=num_texts):
            case = Case(ExecutionMode.CLOUD_ONLY, GREEDY.temperature)
            result = decoder.decode(prompt.text, case, num_positions + MAX_DEPTH, GREEDY.seed)
            prompt_ids = tuple(tokenizer.encode(prompt.text))
            trace = trace_text(draft, prompt_ids, result.token_ids, GREEDY, num_positions)
            found.append(KnownText(prompt_ids, result.token_ids, TracedText(trace)))
    return found


@dataclass(frozen=True, slots=True)
class RealRequest:
    """Holds one request; times in seconds on this machine's clock."""

    text: int
    start_s: float
    token_times_s: list[float]
    result: SessionResult

    @property
    def tpot_s(self) -> float:
        """Returns (last - first token) / (tokens - 1)."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1)


class ReplayEdges:
    """Runs sessions at once, a thread each, over one address after the other."""

    def __init__(self, texts: Sequence[KnownText], times: DraftTimes, settings: RunConfig) -> None:
        """Takes `settings` of greedy texts without an end; their address is given to `run`."""
        self._texts, self._times = texts, times
        self._config = with_values(settings, temperature=0.0, ignore_eos=True)
        self._edge: Edge = create_edge(replace(self._config, mode=ExecutionMode.CLOUD_ONLY))

    def run(
        self, address: str, num_sessions: int, requests_each: int, **settings: object
    ) -> list[RealRequest]:
        """Lets every session ask for `requests_each` texts one after the other, starting with another one.

        Raises the first error that a session met.
        """
        config = with_values(self._config, verifier=address, **settings)
        found: list[RealRequest] = []
        errors: list[BaseException] = []

        def work(session: int) -> None:
            try:
                for number in range(requests_each):
                    found.append(self._ask((session + number) % len(self._texts), config))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(session,)) for session in range(num_sessions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def _ask(self, place: int, config: RunConfig) -> RealRequest:
        known = self._texts[place]
        draft = ReplayDraft(known, self._times, self._edge.tokenizer)
        edge = Edge(config, self._edge.tokenizer, draft, 0.0, ())
        session = edge.session(known.prompt_ids, GREEDY.seed)
        start_s = time.perf_counter()
        for _ in session.generate():
            pass
        result = session.result
        return RealRequest(place, start_s, [ns / 1e9 for ns in result.stats.token_times_ns], result)


def tokens_per_s(requests: Sequence[RealRequest]) -> float:
    """Returns tokens a second from the first request's begin to the last token."""
    start_s, end_s = min(each.start_s for each in requests), max(each.token_times_s[-1] for each in requests)
    return sum(len(each.token_times_s) for each in requests) / (end_s - start_s)
