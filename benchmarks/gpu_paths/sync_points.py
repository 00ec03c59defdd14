"""How often a step's host waits for a GPU or copies to or from it, besides its forward: counted on a fake device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine_texts import NO_LIMITS
from benchmarks.gpu_paths.fake_device import FakeDevice
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.base import ForwardItem, Logits
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.verification.device_step import DeviceStep
from outrider.common.methods import sends_probs, sends_support
from outrider.common.types import (
    Method,
    Opened,
    OpenRequest,
    SamplingParams,
    SessionResponse,
    Support,
    Verdict,
    VerifyRequest,
)
from outrider.experiments.shared.results import at_least, at_most, judged
from outrider.experiments.synthetic.target import SyntheticBackend
from outrider.kernels import device, device_truncation

MAX_SYNC_POINTS = 2  # an upload and a download
KERNELS = (device, "_search"), (device_truncation, "_cut")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=3)
PENALIZED = replace(
    SAMPLED,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    logit_bias=((9, 1.0),),
    bad_words=((7, 8), (5,)),
    min_new_tokens=9,
)
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "truncated": SAMPLED, "penalised": PENALIZED}
DRAFT = (11, 12, 13)
NUM_SESSIONS = 2


class StoppedClock:
    """Implements `Clock`: on a slow machine, too, all that arrived is admitted to one step."""

    def now(self) -> float:
        """Returns 0."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Does nothing."""


class DeviceTarget(SyntheticBackend):
    """Leaves its logits on the fake device."""

    device = "fake"

    def __init__(self, fake: FakeDevice) -> None:
        super().__init__()
        self._fake = fake

    def forward(self, items: list[ForwardItem]) -> Logits:  # type: ignore[override]
        """Returns a copy, as a GPU does, whose logits of the last step stay."""
        logits: Any = self._fake.put(torch.from_numpy(super().forward(items)).clone())
        return logits  # type: ignore[no-any-return]


def run() -> Found:
    """Counts a round of each method, and one with a fault planted."""
    counts = {
        f"{method} {name}": count_round(method, sampling)
        for method in Method
        for name, sampling in SAMPLINGS.items()
    }
    num_cases = f"{len(Method)} methods x {len(SAMPLINGS)} samplings"
    what = f"copies and waits of a step besides its forward, the most of {num_cases}"
    most = max(counted.total() for counted in counts.values())
    with reading_a_number():
        planted = count_round(Method.COUPLED, SAMPLED).total()
    measures = [
        judged("gpu.sync_points", what, most, "", at_most(MAX_SYNC_POINTS)),
        judged(
            "gpu.sync_points_planted",
            "the same where a number of the logits is read",
            planted,
            "",
            at_least(most + 1),
        ),
    ]
    return measures, {"counts": {name: dict(counted) for name, counted in counts.items()}}


@contextmanager
def reading_a_number() -> Iterator[None]:
    """Plants a fault: a step waits for one number of its logits."""
    wait = DeviceStep.wait

    def read_and_wait(step: DeviceStep) -> None:
        step.raw[0, 0].item()
        wait(step)

    DeviceStep.wait = read_and_wait  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DeviceStep.wait = wait  # type: ignore[method-assign]


def count_round(method: Method, sampling: SamplingParams) -> Counter[str]:
    """Returns what is counted in a step of one round of each session, by operation."""
    sizes = device.SPAN, device.TILE_BLOCKS
    device.SPAN, device.TILE_BLOCKS = 256, 32  # for the interpreter: a row is one tile
    try:
        with FakeDevice(*KERNELS) as fake:
            backend: Any = DeviceTarget(fake)
            engine = Engine(
                backend, make_model_info(backend, ServeConfig()), queue_limits=NO_LIMITS, clock=StoppedClock()
            )
            opened = _ask(engine, [_opening(number, method, sampling) for number in range(NUM_SESSIONS)])
            fake.counts.clear()
            num_before = engine.num_steps
            rounds = [_round(reply, method) for reply in opened if isinstance(reply, Opened)]
            replies = _ask(engine, rounds)
            assert len(replies) == sum(isinstance(reply, Verdict) for reply in replies) == NUM_SESSIONS, (
                replies
            )
            assert engine.num_steps == num_before + 1, "the rounds were not one step"
            return Counter(fake.counts)
    finally:
        device.SPAN, device.TILE_BLOCKS = sizes


def _opening(number: int, method: Method, sampling: SamplingParams) -> OpenRequest:
    return OpenRequest(_id(number), (5, 6, 7), 3, sampling, method, num_logprobs=5, ignore_eos=True)


def _round(opened: Opened, method: Method) -> VerifyRequest:
    request = VerifyRequest(1, opened.position, opened.hash, draft_tokens=DRAFT)
    if sends_support(method):
        return replace(request, q_support=tuple(Support((token_id, 4, 20), (3, 1, 1)) for token_id in DRAFT))
    return replace(request, q_token_probs=(0.6,) * len(DRAFT) if sends_probs(method) else ())


def _ask(engine: Engine, requests: Sequence[OpenRequest | VerifyRequest]) -> list[SessionResponse]:
    replies: list[SessionResponse] = []
    for number, request in enumerate(requests):
        engine.submit(Job(_id(number), request, replies.append, 0))
    while engine.step():
        pass
    return replies


def _id(number: int) -> bytes:
    return bytes([number]) * 16
