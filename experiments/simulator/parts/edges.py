"""Simulated edges: each asks one request after the other of the product's own `EdgeSession`."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.common.errors import OutriderError
from outrider.edge_client.core.events import SessionEvent, TokenEvent
from outrider.edge_client.session.factory import Edge, Surroundings
from outrider.edge_client.session.session import EdgeSession, SessionResult
from outrider.experiments.simulator.config import EdgePlan
from outrider.experiments.simulator.parts import text
from outrider.experiments.simulator.parts.drafts import SimulatedTokenizer, TracedDraft, TracedText
from outrider.experiments.simulator.world.standins import VirtualClock
from outrider.experiments.simulator.world.world import World


@dataclass(frozen=True, slots=True)
class Ask:
    """Describes one request: `text` is the place of its trace among all of them, `draw` distinguishes it
    from its likes."""

    num_prompt_tokens: int
    num_output_tokens: int  # at most
    text: int
    draw: int = 0
    name: str = ""


@dataclass(slots=True)
class RequestLog:
    """Records one request as its edge saw it; times in virtual seconds. Filled while it goes on."""

    edge: int
    number: int
    ask: Ask
    start_s: float
    commits: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens at once
    result: SessionResult | None = None
    end_s: float = 0.0
    error: str = ""
    is_finished: bool = False

    @property
    def num_tokens(self) -> int:
        """Returns the tokens committed so far."""
        return sum(num_tokens for _, num_tokens in self.commits)

    @property
    def ttft_s(self) -> float | None:
        """Returns the time to the first token."""
        return self.commits[0][0] - self.start_s if self.commits else None

    @property
    def tpot_s(self) -> float | None:
        """Returns (last - first token) / (tokens - 1)."""
        if self.num_tokens < 2:
            return None
        return (self.commits[-1][0] - self.commits[0][0]) / (self.num_tokens - 1)


class PacedSession:
    """Wraps an `EdgeSession` whose tokens somebody shows as they come, which takes time; notes when that
    was. `clock` is the session's."""

    def __init__(self, session: EdgeSession, world: World, commit_s: float, log: RequestLog) -> None:
        self.clock = VirtualClock(world)
        self._session, self._world, self._commit_s, self._log = session, world, commit_s, log

    @property
    def result(self) -> SessionResult:
        """Returns the session's result."""
        return self._session.result

    def generate(self) -> Iterator[SessionEvent]:
        """Yields the session's events. Tokens that joined the text together are one commit."""
        events = self._session.generate()
        assert isinstance(events, Generator)
        with contextlib.closing(events):  # where the world ends, the session closes now, not when forgotten
            yield from self._paced(events)

    def _paced(self, events: Iterator[SessionEvent]) -> Iterator[SessionEvent]:
        commits, last_ns = self._log.commits, -1
        for event in events:
            yield event
            if not isinstance(event, TokenEvent):
                continue
            if event.time_ns == last_ns:
                at_s, num_tokens = commits[-1]
                commits[-1] = at_s, num_tokens + 1
                continue
            last_ns = event.time_ns
            commits.append((self._world.now_s, 1))
            if self._commit_s:
                self._world.sleep(self._commit_s)


class SimulatedEdge:
    """Sends the requests of `asks`, one after the other; `follow` runs the session of each."""

    def __init__(
        self,
        world: World,
        plan: EdgePlan,
        number: int,
        address: str,
        texts: list[TracedText],
        asks: Iterator[Ask],
        chance: random.Random,
        follow: Follow,
        on_end: Callable[[RequestLog], None],
        surroundings: Surroundings,
    ) -> None:
        self._world, self._plan, self._number, self._num_texts = world, plan, number, len(texts)
        self._asks, self._random = asks, chance
        self._config = replace(plan.config, verifier=address)
        draft = TracedDraft(plan.draft, texts, world.sleep)
        tokenizer: Any = SimulatedTokenizer()
        self._edge = Edge(self._config, tokenizer, draft, 0.0, (), surroundings=surroundings)
        self._follow, self._on_end = follow, on_end

    def run(self) -> None:
        """Runs as a task, until it has asked all it wanted to, if ever."""
        group = self._plan.group
        within_s = group.start_within_s if group.start_within_s is not None else group.think_s
        self._world.sleep(self._random.uniform(0.0, within_s))
        for number, ask in enumerate(self._asks):
            if group.rate:
                self._world.start(self._ask, number, ask)
                self._world.sleep(self._random.expovariate(group.rate))
            else:
                self._ask(number, ask)
                if group.think_s:
                    self._world.sleep(self._random.expovariate(1 / group.think_s))

    def _ask(self, number: int, ask: Ask) -> None:
        log = RequestLog(self._number, number, ask, self._world.now_s)
        config = replace(self._config, max_new_tokens=ask.num_output_tokens)
        # The seed says which text it is, to the edge's draft and to a co-located one.
        seed = ask.draw * self._num_texts + ask.text
        session = self._edge.session(text.prompt_of(ask.num_prompt_tokens), seed, config)
        try:
            self._follow(PacedSession(session, self._world, self._plan.times.commit_ms / 1e3, log), log)
        finally:  # also where the world ends first
            log.end_s, log.result = self._world.now_s, session.result
            self._on_end(log)


def draw_asks(plan: EdgePlan, texts: range, chance: random.Random) -> Iterator[Ask]:
    """Yields as many requests as the group says, of texts by chance."""
    limit = plan.group.requests
    for _ in itertools.count() if limit is None else range(limit):
        yield Ask(
            num_prompt_tokens=chance.randint(*plan.prompt_tokens),
            num_output_tokens=chance.randint(*plan.output_tokens),
            text=chance.choice(texts),
            draw=chance.randrange(1 << 20),
        )


def follow(session: PacedSession, log: RequestLog) -> None:
    """Runs a session to the end of its text, or to an error that the product reports."""
    try:
        for _ in session.generate():
            pass
        log.is_finished = True
    except OutriderError as error:
        log.error = f"{type(error).__name__}: {error}"


Follow = Callable[[PacedSession, RequestLog], None]
