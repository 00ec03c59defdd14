"""Two batches in flight: a step launches its own before it collects the one before, as on a GPU."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.fakes import FakeBackend

from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.engine.driver import EngineDriver
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.finish import make_rows
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.verification.rows import HostRows, StepRound
from outrider.common.alignment import TokenChain
from outrider.common.clock import SYSTEM_CLOCK
from outrider.common.types import (
    Closed,
    CloseRequest,
    GeneratedTokens,
    GenerateRequest,
    Opened,
    OpenRequest,
    Progress,
    RoundError,
    RoundErrorCode,
    SessionResponse,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from tests.cloud_verifier.engine.test_engine import GREEDY, SAMPLED, Harness, make_model, round_of

FORWARD_S = 0.01


class Device:
    """Computes what is launched in that order, one batch after another, and logs what the host asks of it."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.log: list[str] = []
        self.busy_until_s = 0.0
        self.fails_next = False

    def make_rows(
        self, logits: Logits, rounds: Sequence[StepRound], eos_token_ids: TokenIds, num_tokens: int
    ) -> list[DelayedRows]:
        launch = Launch(self)
        ends = np.cumsum([each.num_rows for each in rounds]).tolist()
        return [
            DelayedRows(launch, logits[end - each.num_rows : end], each, eos_token_ids, num_tokens)
            for each, end in zip(rounds, ends, strict=True)
        ]


class Launch:
    """One batch on the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.number = sum(entry.startswith("launch") for entry in device.log)
        device.log.append(f"launch {self.number}")
        device.busy_until_s = max(device.busy_until_s, device.clock.now()) + FORWARD_S
        self.end_s, self.is_awaited = device.busy_until_s, False
        self.fails, device.fails_next = device.fails_next, False

    def wait(self) -> None:
        if not self.is_awaited:
            self.device.log.append(f"wait {self.number}")
        self.is_awaited = True
        clock = self.device.clock
        clock.sleep(max(0.0, self.end_s - clock.now()))
        if self.fails:
            raise RuntimeError("the device failed")


class DelayedRows(HostRows):
    """Rows that must not be read before they were waited for."""

    is_on_device = True

    def __init__(self, launch: Launch, logits: Logits, *arguments: Any) -> None:
        super().__init__(logits, *arguments)
        self._launch = launch

    @property
    def is_computed(self) -> bool:
        return self._launch.device.clock.now() >= self._launch.end_s

    def wait(self) -> None:
        self._launch.wait()

    def target_sample(self, row: int) -> int:
        assert self._launch.is_awaited, "read before it was computed"
        return super().target_sample(row)


def make_harness(backend: FakeBackend | None = None) -> tuple[Harness, Device]:
    device = Device(None)
    harness = Harness(backend, make_rows=device.make_rows)
    device.clock = harness.clock
    return harness, device


def opened(harness: Harness, *names: int) -> dict[int, Opened]:
    return {name: harness.open(name, ignore_eos=True)[1] for name in names}


def ask(harness: Harness, name: int, opening: Opened, round_id: int = 1) -> list[SessionResponse]:
    request = VerifyRequest(round_id, opening.position, opening.hash, draft_tokens=(3, 4))
    return harness.submit(bytes([name]) * 16, request)


def test_the_next_batch_is_launched_before_the_one_in_flight_is_waited_for() -> None:
    harness, device = make_harness()
    sessions = opened(harness, 1, 2)
    device.log.clear()
    first = ask(harness, 1, sessions[1])
    assert harness.engine.step() and not first
    second = ask(harness, 2, sessions[2])
    assert harness.engine.step() and isinstance(first[0], Verdict) and not second
    assert device.log == ["launch 0", "launch 1", "wait 0"]
    harness.settle()
    assert isinstance(second[0], Verdict)


def test_what_a_session_in_flight_is_asked_waits_for_its_batch_in_order() -> None:
    harness, _ = make_harness()
    opening = opened(harness, 1)[1]
    answers: list[SessionResponse] = []
    replies = ask(harness, 1, opening)
    harness.engine.step()
    session_id = b"\1" * 16
    again = ask(harness, 1, opening)  # the same round: a replay
    closed = harness.submit(session_id, CloseRequest())
    harness.engine.step()
    answers = [*replies, *again, *closed]
    assert [type(reply) for reply in answers] == [Verdict, Verdict, Closed]
    assert answers[0] == answers[1]
    harness.settle()
    assert harness.engine.num_sessions == 0 and not harness.backend.sequences


def test_a_round_that_waited_before_its_session_was_in_flight_is_before_those_that_came_after() -> None:
    """It was put behind them, so that a pipelined round found its base to be no prefix."""
    harness, _ = make_harness()
    opened(harness, 1)
    expected = harness.reference((5, 6, 7), GREEDY, 12)
    chain = TokenChain([5, 6, 7, expected[0]])

    def pipelined(round_id: int) -> list[SessionResponse]:
        done = chain.position - 3
        draft = tuple(expected[done : done + 2])
        request = VerifyRequest(round_id, chain.position, chain.hash, draft_tokens=draft, pipelined=True)
        chain.extend(draft)
        return harness.submit(b"\1" * 16, request)

    replies = pipelined(1), pipelined(2)
    assert harness.engine.step() and not replies[0], "the first is in flight, the second waits for it"
    replies = (*replies, pipelined(3), pipelined(4))
    harness.settle()
    verdicts = [each for (each,) in replies if isinstance(each, Verdict)]
    assert [(each.round_id, each.accepted_len) for each in verdicts] == [(n, 2) for n in (1, 2, 3, 4)], (
        replies
    )


def test_a_session_that_is_opened_anew_in_flight_begins_after_its_round() -> None:
    harness, _ = make_harness()
    opening = opened(harness, 1)[1]
    replies = ask(harness, 1, opening)
    harness.engine.step()
    prompt = (9, 8, 7)
    anew = harness.submit(b"\1" * 16, OpenRequest(b"\1" * 16, prompt, 3, GREEDY, round_id=2, ignore_eos=True))
    harness.settle()
    (reply,) = anew
    assert isinstance(replies[0], Verdict) and isinstance(reply, Opened)
    assert [reply.first_token] == harness.reference(prompt, GREEDY, 1)


def test_a_forward_that_raises_ends_its_own_batch_alone() -> None:
    harness, _ = make_harness()
    sessions = opened(harness, 1, 2)
    first = ask(harness, 1, sessions[1])
    harness.engine.step()
    second = ask(harness, 2, sessions[2])
    harness.backend.fail_next = RuntimeError("no kernel")
    harness.settle()
    assert isinstance(first[0], Verdict)
    assert isinstance(second[0], RoundError) and second[0].code is RoundErrorCode.INTERNAL
    assert harness.engine.num_sessions == 1 and harness.engine.observer.num_failed_steps == 1


def test_a_batch_that_fails_on_the_device_ends_its_own_sessions_alone() -> None:
    harness, device = make_harness()
    sessions = opened(harness, 1, 2)
    device.fails_next = True
    first = ask(harness, 1, sessions[1])
    harness.engine.step()
    waiting = harness.submit(b"\1" * 16, round_of(TokenChain([5]), 2))
    second = ask(harness, 2, sessions[2])
    harness.settle()
    assert isinstance(first[0], RoundError) and first[0].code is RoundErrorCode.INTERNAL
    assert isinstance(waiting[0], RoundError) and waiting[0].code is RoundErrorCode.UNKNOWN_SESSION
    assert isinstance(second[0], Verdict)


def test_a_batch_without_room_waits_for_the_one_in_flight_and_takes_its_idle_sessions_blocks() -> None:
    harness, device = make_harness(FakeBackend(kv_tokens=8))
    sessions = opened(harness, 1, 2)
    device.log.clear()
    first = ask(harness, 1, sessions[1])
    harness.engine.step()
    second = ask(harness, 2, sessions[2])
    harness.engine.step()
    harness.settle()
    assert isinstance(first[0], Verdict) and isinstance(second[0], Verdict)
    assert device.log.index("wait 0") < device.log.index("launch 1"), "the pool holds one round"


def test_a_generation_is_collected_in_its_own_step() -> None:
    harness, device = make_harness()
    opening = opened(harness, 1)[1]
    request = GenerateRequest(1, opening.position, opening.hash, max_new_tokens=5)
    replies = harness.submit(b"\1" * 16, request)
    device.log.clear()
    assert harness.engine.step() and isinstance(replies[0], GeneratedTokens)
    assert device.log == ["launch 0", "wait 0"]
    harness.settle()
    written = [token_id for reply in replies for token_id in reply.token_ids]  # type: ignore[union-attr]
    assert [opening.first_token, *written] == harness.reference((5, 6, 7), GREEDY, 6)


class TensorBackend(FakeBackend):
    """Leaves its logits in a tensor."""

    def forward(self, items: Sequence[ForwardItem]) -> Any:
        return torch.from_numpy(super().forward(items))


def test_a_step_of_chunks_of_prompts_alone_is_waited_for_too() -> None:
    def rows_here(logits: Any, *arguments: Any) -> Any:
        return make_rows(logits.numpy(), *arguments)

    harness, prompt = Harness(TensorBackend(), max_step_tokens=16, make_rows=rows_here), (5, 6, 7, 8) * 10
    replies = harness.submit(b"\1" * 16, OpenRequest(b"\1" * 16, prompt, 40, GREEDY))
    assert harness.engine.step() and not replies, "its chunk is in flight"
    assert harness.engine.step() and replies == [Progress(0, 16, 40)]
    harness.settle()
    assert isinstance(opened := replies[-1], Opened)
    assert [opened.first_token] == harness.reference(prompt, GREEDY, 1)


def test_a_forwards_time_is_the_devices_own_where_batches_overlap() -> None:
    harness, _ = make_harness()
    sessions = opened(harness, 1, 2)
    start_s = harness.clock.now_s
    first = ask(harness, 1, sessions[1])
    harness.engine.step()
    harness.clock.now_s = start_s + 0.004
    second = ask(harness, 2, sessions[2])
    harness.settle()
    for reply, total_s in ((first[0], 0.01), (second[0], 0.016)):
        assert isinstance(reply, Verdict)
        assert reply.metrics.forward_ns == pytest.approx(FORWARD_S * 1e9, rel=1e-3)
        assert reply.metrics.total_ns == pytest.approx(total_s * 1e9, rel=1e-3)
    counted = harness.engine.observer.forward_ns
    assert counted.total == pytest.approx(4 * FORWARD_S * 1e9, rel=1e-3) and sum(counted.counts) == 4


def test_a_step_waits_for_arrivals_until_the_device_is_nearly_done() -> None:
    harness, device = make_harness()
    sessions = opened(harness, *range(1, 5))
    for name in (1, 2):  # so that a forward's time is known
        ask(harness, name, sessions[name])
        harness.settle()
    begin_s, late = harness.clock.now_s, list[bytes]()
    ask(harness, 3, sessions[3])
    harness.engine.step()
    sleep = harness.clock.sleep

    def arrive(seconds: float) -> None:
        sleep(seconds)
        if not late and harness.clock.now_s > begin_s + FORWARD_S / 2:
            late.append(b"\4")
            ask(harness, 4, sessions[4])

    harness.clock.sleep = arrive  # type: ignore[method-assign]
    device.log.clear()
    harness.engine.step()
    assert device.log == ["launch 0", "wait 6"], "what came while the step waited was not in its batch"


@pytest.mark.parametrize("seed", range(4))
def test_interleaved_sessions_write_the_targets_own_texts(seed: int) -> None:
    """Rounds, generations, closes and new openings at random moments, over a pool that is too small for all."""
    rng = random.Random(seed)
    harness, device = make_harness(FakeBackend(kv_tokens=120))
    texts = [Text(harness, name, SAMPLED if name % 2 else GREEDY, rng) for name in range(1, 7)]
    for _ in range(400):
        rng.choice(texts).advance()
        if rng.random() < 0.7:
            harness.engine.step()
            harness.engine.check_integrity()
    harness.settle()
    for text in texts:
        text.check()
    overlapped = sum(
        a.startswith("launch") and b.startswith("launch")
        for a, b in zip(device.log, device.log[1:], strict=False)
    )
    assert overlapped > 5


class Text:
    """One client, whose session is lost at times."""

    def __init__(self, harness: Harness, name: int, sampling: Any, rng: random.Random) -> None:
        self.harness, self.session_id, self.rng = harness, bytes([name]) * 16, rng
        self.sampling, self.prompt = sampling, [name, 7, 8]
        self.chain = TokenChain(self.prompt)
        self.expected = harness.reference(self.prompt, sampling, 40)
        self.replies: list[SessionResponse] | None = None
        self.take: Callable[[Any], None]
        self.round_id = 0

    def advance(self) -> None:
        if self.replies is not None:
            final = [reply for reply in self.replies if not isinstance(reply, Progress)]
            if not final or (isinstance(final[-1], GeneratedTokens) and not final[-1].is_last):
                return
            for reply in final:
                self.receive(reply)
            self.replies = None
        done = self.chain.position - 3
        if done > 30:
            return
        self.round_id += 1
        if done == 0 or self.rng.random() < 0.05:
            self.chain.truncate(3)
            opening = OpenRequest(
                self.session_id, tuple(self.prompt), 3, self.sampling, round_id=self.round_id, ignore_eos=True
            )
            self.replies = self.harness.submit(self.session_id, opening)
        elif self.rng.random() < 0.1:
            request = GenerateRequest(self.round_id, self.chain.position, self.chain.hash, max_new_tokens=3)
            self.replies = self.harness.submit(self.session_id, request)
        else:
            self.draft = self.expected[done : done + self.rng.randrange(4)]
            if self.draft and self.rng.random() < 0.5:
                self.draft[-1] = (self.draft[-1] + 1) % 32
            self.replies = self.harness.submit(
                self.session_id, round_of(self.chain, self.round_id, self.draft)
            )

    def receive(self, reply: Any) -> None:
        match reply:
            case Opened():
                self.chain.truncate(3)
                self.chain.extend([reply.first_token])
            case Verdict():
                self.chain.extend([*self.draft[: reply.accepted_len], reply.correction])
                assert (self.chain.position, self.chain.hash) == (reply.position, reply.hash)
            case GeneratedTokens():
                self.chain.extend(reply.token_ids)
            case _:
                assert reply.code in (RoundErrorCode.REFUSED, RoundErrorCode.UNKNOWN_SESSION), reply
                if reply.code is RoundErrorCode.UNKNOWN_SESSION:
                    self.chain.truncate(3)

    def check(self) -> None:
        written = self.chain.token_ids[3:]
        assert len(written) > 1 and written == self.expected[: len(written)]


@dataclass
class Sent:
    """A round in flight: its base and draft as its client assumes them."""

    replies: list[SessionResponse]
    start: int
    draft: list[int]
    assumed: list[int]  # the sequence before it


class Pipelining:
    """One client that keeps up to three rounds in flight, each on the one before as if all of it were accepted."""

    def __init__(self, harness: Harness, name: int, rng: random.Random) -> None:
        self.harness, self.session_id, self.rng = harness, bytes([name]) * 16, rng
        prompt = [name, 7, 8]
        self.expected = [*prompt, *harness.reference(prompt, SAMPLED, 80)]
        opening = harness.open(name, prompt, SAMPLED, ignore_eos=True)[1]
        self.text = [*prompt, opening.first_token]
        self.sent: deque[Sent] = deque()
        self.num_rounds = self.num_verdicts = self.num_dropped = 0

    def advance(self) -> None:
        while self.sent and (replies := self.sent[0].replies):
            self.receive(self.sent.popleft(), replies[0])
        if len(self.sent) < 3 and len(self.text) < 45 and self.rng.random() < 0.8:
            self.send()

    def send(self) -> None:
        last = self.sent[-1] if self.sent else None
        assumed = self.text if last is None else [*last.assumed, *last.draft]
        draft = self.expected[len(assumed) : len(assumed) + 1 + self.rng.randrange(3)]
        if self.rng.random() < 0.3:
            draft[-1] = (draft[-1] + 1) % 32
        self.num_rounds += 1
        base = TokenChain(assumed)
        request = VerifyRequest(
            self.num_rounds, base.position, base.hash, draft_tokens=tuple(draft), pipelined=True
        )
        replies = self.harness.submit(self.session_id, request)
        self.sent.append(Sent(replies, len(assumed), draft, list(assumed)))

    def receive(self, sent: Sent, reply: Any) -> None:
        known = self.text[: sent.start]
        begins = sent.draft[: len(self.text) - sent.start] == self.text[sent.start :]
        if known != sent.assumed or not begins:
            assert isinstance(reply, RoundError) and reply.code is RoundErrorCode.STALE, reply
            self.num_dropped += 1
            return
        assert isinstance(reply, Verdict), (sent, reply)
        self.text = [*sent.assumed, *sent.draft[: reply.accepted_len], reply.correction]
        self.num_verdicts += 1


@pytest.mark.parametrize("seed", range(4))
def test_of_rounds_in_flight_those_that_assume_what_came_true_have_verdicts(seed: int) -> None:
    """Three of a session at a time, some admitted before a batch of it is launched and some while it computes."""
    rng = random.Random(seed)
    harness, _ = make_harness()
    clients = [Pipelining(harness, name, rng) for name in range(1, 5)]
    for _ in range(600):
        rng.choice(clients).advance()
        if rng.random() < 0.4:
            harness.engine.step()
    harness.settle()
    for client in clients:
        while client.sent:
            client.advance()
            harness.settle()
        assert client.text == client.expected[: len(client.text)] and len(client.text) >= 45
        assert client.num_verdicts > 10
    assert sum(client.num_dropped for client in clients) > 5


def test_a_driver_collects_what_is_in_flight_though_nothing_else_arrives() -> None:
    async def drive() -> list[list[int]]:
        backend, device = FakeBackend(), Device(SYSTEM_CLOCK)
        backend.device = "cuda"
        engine = Engine(backend, make_model(backend), make_rows=device.make_rows)
        driver = EngineDriver(engine)
        driver.start()
        try:
            return await asyncio.gather(*(write(engine, name) for name in range(1, 5)))
        finally:
            await driver.stop()

    async def write(engine: Engine, name: int) -> list[int]:
        """A session's text of five rounds, each sent when the one before was answered."""
        loop, session_id, chain = asyncio.get_running_loop(), bytes([name]) * 16, TokenChain([name, 7, 8])

        async def ask(request: OpenRequest | VerifyRequest) -> Any:
            answer: asyncio.Future[Any] = loop.create_future()
            reply = partial(loop.call_soon_threadsafe, answer.set_result)
            engine.submit(Job(session_id, request, reply, int(SYSTEM_CLOCK.now() * 1e9)))
            return await asyncio.wait_for(answer, 20.0)

        opened = await ask(OpenRequest(session_id, (name, 7, 8), 3, GREEDY, ignore_eos=True))
        chain.extend([opened.first_token])
        for round_id in range(1, 6):
            verdict = await ask(round_of(chain, round_id, (3,)))
            chain.extend([*(3,)[: verdict.accepted_len], verdict.correction])
        return chain.token_ids[3:]

    for name, text in enumerate(asyncio.run(drive()), 1):
        assert len(text) > 5 and text == Harness().reference([name, 7, 8], GREEDY, len(text))
