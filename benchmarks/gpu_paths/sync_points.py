"""How often a whole step's host waits for a GPU or copies to or from it: counted on a fake device, forward included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from benchmarks.engine_texts import NO_LIMITS
from benchmarks.gpu_check.shape import ModelWeights, Shape, make_facts, make_model, own_config
from benchmarks.gpu_check.stage import Setting
from benchmarks.gpu_check.stand_ins import RunAgain
from benchmarks.gpu_paths.fake_device import NAME, FakeDevice
from benchmarks.results_file import Found
from outrider.cloud_verifier.backends.attention.paged import PagedPlanner
from outrider.cloud_verifier.backends.cuda.decoder import CudaDecoder
from outrider.cloud_verifier.backends.cuda.pool_changes import PoolChanges, Upload
from outrider.cloud_verifier.backends.paged_backend import BLOCK_SIZE, PagedBackend
from outrider.cloud_verifier.backends.products.row_plan import RowPlan
from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.verification import foreseen
from outrider.cloud_verifier.verification.device_step import DeviceStep
from outrider.common.methods import sends_probs, sends_support, takes_trees
from outrider.common.types import (
    Method,
    Opened,
    OpenRequest,
    Origin,
    SamplingParams,
    SessionRequest,
    SessionResponse,
    Support,
    TokenIds,
    Verdict,
    VerifyRequest,
)
from outrider.experiments.shared.results import at_least, at_most, judged
from outrider.kernels import device, device_truncation, layers, paged_attention

MAX_SYNC_POINTS = 2  # an upload and a download
KERNELS = (
    (device, "_search"),
    (device, "_combine_spans"),
    (device_truncation, "_cut"),
    (layers, "_add_norm"),
    (layers, "_rotate"),
    (layers, "_gate"),
    (paged_attention, "_attend_split"),
    (paged_attention, "_combine"),
)
SHAPE = Shape(32, 1, 2, 1, 16, 48, 72, 64)
NUM_BLOCKS = 128
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, min_p=0.01, seed=3)
PENALIZED = replace(
    SAMPLED,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    logit_bias=((9, 1.0),),
    bad_words=((7, 8), (5,)),
    min_new_tokens=9,
)
STOPS = (1, 5)  # masked as long as the text is short
SAMPLINGS = {"greedy": GREEDY, "truncated": SAMPLED, "penalised": PENALIZED}
PROMPT = tuple(range(3, 3 + BLOCK_SIZE + 1))  # a whole block of it is found again
CHUNK_TOKENS = 16  # of a prompt beside rounds
LONG_PROMPT = (2,) * (2 * CHUNK_TOKENS)
DRAFT = (11, 12, 13)


class StoppedClock:
    """Implements `Clock`: on a slow machine, too, all that arrived is admitted to one step."""

    def now(self) -> float:
        """Returns 0."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        """Does nothing."""


class DeviceWeights(ModelWeights):
    """Gives the weights as tensors of the fake device."""

    def __init__(self, model: Any, fake: FakeDevice) -> None:
        super().__init__(model)
        self.device, self._fake = str(NAME), fake

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """Returns a tensor."""
        return self._fake.put(super().read(name, *shape))


@dataclass
class Verifier:
    """Holds an engine whose target is on the fake device, and what was counted in each of its steps."""

    engine: Engine
    fake: FakeDevice
    steps: dict[str, list[Counter[str]]] = field(default_factory=dict)  # by what they are of

    def ask(self, what: str, requests: Mapping[int, SessionRequest]) -> dict[int, Any]:
        """Returns the last reply to each session's request. All are admitted to one step; some need further ones."""
        replies: dict[int, list[SessionResponse]] = {name: [] for name in requests}
        for name, request in requests.items():
            self.engine.submit(Job(_id(name), request, replies[name].append, 0))
        self.fake.counts.clear()
        num_before = self.engine.num_steps
        while self.engine.step():  # which launches a step, or collects it
            if self.engine.num_steps > num_before:
                self.steps.setdefault(what, []).append(Counter(self.fake.counts))
                self.fake.counts.clear()
                num_before = self.engine.num_steps
        return {name: each[-1] for name, each in replies.items()}

    @property
    def most(self) -> int:
        """Returns the most copies and waits of a step."""
        return max(counted.total() for of_steps in self.steps.values() for counted in of_steps)


def run() -> Found:
    """Counts steps that mix everything, with each sampling, and the same with faults planted."""
    counts = {name: count_steps(sampling) for name, sampling in SAMPLINGS.items()}
    counts["truncated, in several passes"] = count_steps(SAMPLED, row_plan=RowPlan((8, 16)))
    num_steps = sum(len(each) for found in counts.values() for each in found.steps.values())
    what = f"copies and waits of a whole step, the most of {num_steps}: all {len(Method)} methods and trees beside "
    what += "prompts in chunks and out of the prefix cache, the step after the trees, one sampling each"
    most = max(found.most for found in counts.values())
    measures = [judged("gpu.sync_points", what, most, "", at_most(MAX_SYNC_POINTS))]
    for id, plant, sampling, method, what in (
        ("planted", reading_a_number, GREEDY, Method.COUPLED, "a number of the logits is read"),
        (
            "planted_move",
            moving_at_once,
            GREEDY,
            Method.COUPLED,
            "a tree's tokens are moved by a copy of their own",
        ),
        ("unforeseen", foreseeing_nothing, SAMPLED, Method.CANDIDATES, "a method's samples are not foreseen"),
    ):
        with plant():
            planted = count_steps(sampling, [method]).most
        measures.append(
            judged(f"gpu.sync_points_{id}", f"the same where {what}", planted, "", at_least(most + 1))
        )
    details = {
        name: {what: [dict(each) for each in of_steps] for what, of_steps in found.steps.items()}
        for name, found in counts.items()
    }
    return measures, {"counts": details}


@contextmanager
def reading_a_number() -> Iterator[None]:
    """Plants a fault: a step waits for one number of its logits."""
    wait = DeviceStep.wait

    def read_and_wait(step: DeviceStep) -> None:
        step.raw[0, 0].item()
        wait(step)

    with mock.patch.object(DeviceStep, "wait", read_and_wait):
        yield


@contextmanager
def moving_at_once() -> Iterator[None]:
    """Plants a fault: where a tree's tokens move to goes to the device by itself."""
    stage = PoolChanges.stage

    def stage_alone(changes: PoolChanges, upload: Upload) -> None:
        stage(changes, lambda values: torch.tensor(values, device=NAME))

    with mock.patch.object(PoolChanges, "stage", stage_alone):
        yield


@contextmanager
def foreseeing_nothing() -> Iterator[None]:
    """Plants a fault: samples are drawn when a method asks for them."""
    with mock.patch.object(foreseen, "foresee", lambda each: []):
        yield


def count_steps(
    sampling: SamplingParams, methods: Sequence[Method] = tuple(Method), row_plan: RowPlan | None = None
) -> Verifier:
    """Returns what is counted from the first opening to the round after a tree, with a session of each method, and one
    more for trees of `coupled` and of each that takes them; with `row_plan` in passes of so many rows."""
    with (
        mock.patch.multiple(device, SPAN=128, TILE_BLOCKS=16),  # for the interpreter: a row is one tile
        mock.patch.multiple(device_truncation, TILE=128, NUM_PIVOTS=128),
        FakeDevice(KERNELS) as fake,
    ):
        verifier = Verifier(_make_engine(fake, row_plan), fake)
        chains, drafts_trees = dict(enumerate(methods)), {Method.COUPLED, *filter(takes_trees, methods)}
        trees = dict(enumerate(sorted(drafts_trees), len(chains)))
        names, scout, chunked = chains | trees, len(Method) + 10, len(Method) + 11
        opening = _opening(scout, Method.COUPLED, sampling)
        path = _next_tokens(verifier, scout, verifier.ask("a prompt", {scout: opening})[scout])
        openings = {name: _opening(name, method, sampling) for name, method in names.items()}
        num_fed = verifier.engine.backend.num_query_rows
        replies = verifier.ask("prompts that are found again", openings)
        num_fed = verifier.engine.backend.num_query_rows - num_fed
        assert num_fed == len(openings), "their blocks were fed again"
        rounds: dict[int, SessionRequest] = {
            name: _round(1, replies[name], method) for name, method in chains.items()
        }
        rounds |= {name: _tree_round(replies[name], method, path) for name, method in trees.items()}
        rounds[chunked] = _opening(chunked, Method.COUPLED, sampling, LONG_PROMPT)
        replies = verifier.ask("rounds, trees, chunks of a prompt", rounds)
        accepted = [
            replies[name].accepted_nodes for name, method in trees.items() if method == Method.COUPLED
        ]
        assert accepted == [(1, 2)], "no token moves"
        rounds = {name: _round(2, replies[name], method) for name, method in names.items()}
        replies = verifier.ask("rounds after trees", rounds)
        assert all(isinstance(reply, Verdict) for reply in replies.values()), replies
        return verifier


def _make_engine(fake: FakeDevice, row_plan: RowPlan | None) -> Engine:
    setting = Setting(is_rehearsal=True, limit_s=600.0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make_model(setting, SHAPE, torch.float32)
    facts = replace(make_facts(setting, SHAPE, torch.float32), device=str(NAME))
    decoder = CudaDecoder(own_config(model), DeviceWeights(model, fake), layers, RunAgain())
    backend = PagedBackend(decoder, facts, num_blocks=NUM_BLOCKS)
    assert backend.inputs is not None
    num_groups = SHAPE.num_heads // SHAPE.num_kv_heads
    backend.planner = PagedPlanner(BLOCK_SIZE, num_groups, NAME, upload=backend.inputs.add)
    backend.has_paged_kernel = backend.has_device_logits = True
    backend.row_plan = row_plan
    return Engine(
        backend,
        make_model_info(backend, ServeConfig()),
        prefill_chunk_tokens=CHUNK_TOKENS,
        queue_limits=NO_LIMITS,
        clock=StoppedClock(),
    )


def _opening(name: int, method: Method, sampling: SamplingParams, prompt: TokenIds = PROMPT) -> OpenRequest:
    stops = STOPS if sampling.min_new_tokens else ()
    return OpenRequest(
        _id(name),
        prompt,
        len(prompt),
        sampling,
        method,
        num_logprobs=5,
        stop_token_ids=stops,
        ignore_eos=True,
    )


def _round(round_id: int, last: Opened | Verdict, method: Method) -> VerifyRequest:
    request = VerifyRequest(round_id, last.position, last.hash, draft_tokens=DRAFT)
    if isinstance(last, Verdict) and last.candidates:
        chosen = last.candidates[0].token_id
        request = replace(request, committed_tokens=(chosen,), origins=(Origin.CORRECTION,))
    if sends_support(method):
        return replace(request, q_support=tuple(Support((token_id, 4, 20), (3, 1, 1)) for token_id in DRAFT))
    return replace(request, q_token_probs=(0.6,) * len(DRAFT) if sends_probs(method) else ())


def _tree_round(last: Opened, method: Method, path: Sequence[int]) -> VerifyRequest:
    """Returns a round whose tree has another token before the first one of the path."""
    first, other = path[0], (path[0] + 1) % SHAPE.num_tokens
    request = VerifyRequest(1, last.position, last.hash, draft_tokens=(other, *path), parents=(-1, -1, 1))
    if not sends_support(method):
        return request
    end = path[1], (path[1] + 1) % SHAPE.num_tokens
    return replace(request, q_support=(Support((other, first), (1, 2)), Support(end, (3, 1))))


def _next_tokens(verifier: Verifier, name: int, last: Any) -> list[int]:
    """Returns the target's next two tokens."""
    token_ids = []
    for round_id in (1, 2):
        last = verifier.ask(
            "rounds without a draft", {name: VerifyRequest(round_id, last.position, last.hash)}
        )[name]
        token_ids.append(last.correction)
    return token_ids


def _id(name: int) -> bytes:
    return bytes([name]) * 16
