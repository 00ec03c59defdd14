"""Texts of the embedded pair under faults, every policy and way of sending rounds, and what is wrong with them.

Under `wait` a text must be the one that cloud-only has without faults; under every policy each token that is
called verified must be the one that the target would have chosen after those before it.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outrider.common.errors import OutriderError
from outrider.common.types import SamplingParams, TokenIds
from outrider.edge_client.controller.window import create_window
from outrider.edge_client.core.events import MarkClearedEvent, RolledBackEvent, SessionEvent, TokenEvent
from outrider.edge_client.core.options import ExecutionMode, OnTimeout, Pipelining
from outrider.edge_client.drafting.onnx.model import OnnxDraftModel
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.shared.decoding import Case, Decoder, HungError
from outrider.experiments.shared.prompts import load_prompts
from outrider.experiments.sweep.results.judging import Scorer
from outrider.experiments.sweep.results.texts import first_difference
from outrider.models import EMBEDDED

NUM_NEW = 48
DRAFT_TOKENS = 4
HANGS_S = 150.0  # two recoveries of a minute, and a busy machine
TEMPERATURES = (0.8, 0.0)
# Rounds in flight together need a stream, which keeps their order.
WAYS = (("stream", Pipelining.OFF), ("stream", Pipelining.ON), ("unary", Pipelining.OFF))
HANDLINGS = tuple(
    itertools.product((OnTimeout.WAIT, *OnTimeout), WAYS)
)  # `wait` counts twice: it has the target


@dataclass(frozen=True, slots=True)
class Text:
    """Holds a text of cloud-only, without faults."""

    prompt: str
    sampling: SamplingParams
    token_ids: TokenIds


@dataclass
class Judged:
    """Counts texts and what was wrong with them. `unmarked`: tokens called verified that are not the target's."""

    num_texts: Counter[str] = field(default_factory=Counter)  # by policy
    num_tokens: int = 0
    num_ties: int = 0
    num_unmarked: int = 0
    different: list[str] = field(default_factory=list)  # under wait; a text that failed or hung is one
    unmarked: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)  # errors that other policies allow
    happened: Counter[str] = field(default_factory=Counter)

    def details(self) -> dict[str, Any]:
        """Returns everything as JSON."""
        return {name: dict(v) if isinstance(v, Counter) else v for name, v in vars(self).items()}


class _Shown:
    """Follows a session's events: the tokens, and which of them are called verified."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_verified: list[bool] = []

    def take(self, event: SessionEvent) -> None:
        match event:
            case TokenEvent():
                self.token_ids.append(event.token_id)
                self.is_verified.append(event.is_verified)
            case MarkClearedEvent():
                self.is_verified[event.index] = True
            case RolledBackEvent():
                del self.token_ids[event.num_tokens :], self.is_verified[event.num_tokens :]


class FaultyTexts:
    """Decodes texts against `address`, some at once, and judges them."""

    def __init__(self, draft: OnnxDraftModel, address: str, num_prompts: int) -> None:
        self.judged = Judged()
        self._draft = draft
        self._tokenizer = EdgeTokenizer(EMBEDDED / "draft" / "tokenizer.json")
        self._scorer = Scorer(EMBEDDED / "target")
        self._lock = threading.Lock()
        self.texts = list(self._cloud_only(self.decoder(address), num_prompts))

    def decoder(self, address: str) -> Decoder:
        """Returns a decoder for the verifier, or a link to it, at `address`."""
        return Decoder(address, self._draft, self._tokenizer)

    def _cloud_only(self, decoder: Decoder, num_prompts: int) -> Iterator[Text]:
        prompts = load_prompts(limit=num_prompts)
        for (seed, prompt), temperature in itertools.product(enumerate(prompts, start=1), TEMPERATURES):
            case = Case(ExecutionMode.CLOUD_ONLY, temperature)
            result = decoder.decode(prompt.text, case, NUM_NEW, seed)
            sampling = SamplingParams(temperature=temperature, seed=seed)
            yield Text(prompt.text, sampling, result.token_ids)

    def run(
        self,
        decoder: Decoder,
        number: int,
        label: str,
        on_token: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Decodes text `number` of all, each under the next handling, and adds what is wrong with it."""
        policy, (transport, pipelining) = HANDLINGS[number % len(HANDLINGS)]
        text = self.texts[number // len(HANDLINGS) % len(self.texts)]
        what = f"{label}: {policy}, {transport}, pipeline {pipelining}, T={text.sampling.temperature:g}, #{number}"
        shown, error = _Shown(), ""

        def take(event: SessionEvent) -> None:
            shown.take(event)
            if isinstance(event, TokenEvent):
                on_token(event.index)

        try:
            result = decoder.decode(
                text.prompt,
                Case(ExecutionMode.SPECULATIVE, text.sampling.temperature, DRAFT_TOKENS),
                NUM_NEW,
                text.sampling.seed,
                window=create_window(pipelining, None, "fixed"),
                transport=transport,
                deadline_s=None,
                hangs_s=HANGS_S,
                on_timeout=policy,
                on_event=take,
            )
        except (OutriderError, HungError) as raised:
            error = f"{type(raised).__name__}: {raised}"[:300]
        with self._lock:
            self._judge(what, policy, text, shown, error)
            if not error:
                stats = result.stats
                self.judged.happened += Counter(
                    rounds=len(stats.rounds),
                    reconnects=stats.num_reconnects,
                    rebuilds=stats.num_rebuilds,
                    timeouts=stats.num_timeouts,
                    late_verdicts=stats.num_late_verdicts,
                    kept_unverified=result.num_unverified_tokens,
                )

    def _judge(self, what: str, policy: OnTimeout, text: Text, shown: _Shown, error: str) -> None:
        judged, prompt_ids = self.judged, self._tokenizer.encode(text.prompt)
        judged.num_texts[str(policy)] += 1
        judged.num_tokens += len(shown.token_ids)
        if policy is OnTimeout.WAIT:
            at = first_difference(shown.token_ids, text.token_ids)
            if error:
                judged.different.append(f"{what}: {error}")
            elif at is not None:
                pair = shown.token_ids[at : at + 1], text.token_ids[at : at + 1]
                is_tie = all(pair) and self._scorer.is_tie(
                    prompt_ids, text.token_ids[:at], pair[0][0], pair[1][0], text.sampling
                )
                judged.num_ties += is_tie
                if not is_tie:
                    judged.different.append(f"{what}: differs from token {at} on")
        elif error:
            when = "mid-text" if shown.token_ids else "at its opening"
            judged.ended[f"{policy}: {error.partition(':')[0]} {when}"] += 1
        if all(shown.is_verified) and tuple(shown.token_ids) == text.token_ids[: len(shown.token_ids)]:
            return
        unlike = self._scorer.unlike(prompt_ids, shown.token_ids, text.sampling)
        if wrong := [index for index in unlike if shown.is_verified[index]]:
            judged.num_unmarked += len(wrong)
            judged.unmarked.append(f"{what}: tokens {wrong}")


@contextmanager
def faulty_texts(address: str, num_prompts: int) -> Iterator[FaultyTexts]:
    """Loads draft and target here, and takes cloud-only's texts from the verifier at `address`."""
    with OnnxDraftModel.open(EMBEDDED / "draft") as draft:
        yield FaultyTexts(draft, address, num_prompts)


class Workers:
    """Runs texts one after the other in each of several threads until `stop`."""

    def __init__(self, num_workers: int, one: Callable[[int], None]) -> None:
        self._numbers = itertools.count()
        self._one = one
        self._is_over = threading.Event()
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="text")
        self._futures = [self._pool.submit(self._run) for _ in range(num_workers)]

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._one(next(self._numbers))

    def stop(self) -> None:
        """Waits for the texts under way. Raises what a text raised that is no error of the product."""
        self._is_over.set()
        for future in self._futures:
            future.result()
        self._pool.shutdown()


def random_moments(seed: int, num_moments: int, longest_s: float) -> Sequence[float]:
    """Returns seconds between faults."""
    chance = random.Random(seed)
    return [chance.uniform(0.0, longest_s) for _ in range(num_moments)]
