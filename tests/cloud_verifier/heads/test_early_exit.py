"""A target drafts by some of its own layers: the text is cloud-only's, and what was computed below the exit stays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import make_tiny_target
from test_heads_text import NUM_NEW, KnowingHead, Truth, cloud_only, make_heads, make_prompt

from benchmarks.heads.service import CLOUD_ONLY, Case, Service
from outrider.cloud_verifier.backends.base import ForwardItem
from outrider.cloud_verifier.backends.loading import load_target
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.backends.passes.partial import AheadToken
from outrider.cloud_verifier.backends.products.row_plan import RowPlan
from outrider.cloud_verifier.engine.job import Job
from outrider.cloud_verifier.engine.work import KnownStates, Work
from outrider.cloud_verifier.heads.early_exit import DEFAULT_CHAIN, EarlyExit, num_first
from outrider.cloud_verifier.heads.loading import load_head
from outrider.cloud_verifier.heads.lookahead import Lookahead
from outrider.common.errors import OutriderError
from outrider.common.types import (
    EARLY_EXIT,
    CancelRequest,
    CloseRequest,
    GenerateRequest,
    Method,
    OpenRequest,
    RoundError,
    SamplingParams,
    SessionResponse,
)

NUM_LAYERS = 4
TEXT = [(31 * i * i + 7 * i + 1) % 400 for i in range(60)]


def make_shallow_target(directory: Path, arch: str) -> Path:
    """A target whose later layers add little, so that its first ones often choose what it chooses."""
    make_tiny_target(directory, arch, num_layers=NUM_LAYERS)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            tensor.mul_(0.15)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(
    scope="module", params=[("llama", "float32"), ("qwen3", "bfloat16")], ids=lambda each: each[1]
)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedBackend:
    arch, dtype = request.param
    directory = make_shallow_target(tmp_path_factory.mktemp("target"), arch)
    loaded = load_target(directory, dtype=dtype, kv_bytes=64 << 20)
    assert loaded.is_reproducible
    return loaded


def exit_at(backend: PagedBackend, layers: Sequence[int]) -> EarlyExit:
    return EarlyExit(backend, layers, "")


def write_directory(path: Path, **fields: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"outrider": {"kind": EARLY_EXIT, **fields}}))
    return path


def make_case(seed: int, source: str, temperature: float, **fields: object) -> Case:
    return Case(
        make_prompt(seed, 3 + 9 * seed), SamplingParams(temperature=temperature, seed=seed), source, **fields
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        (Method.COUPLED, (0, 2, 3)),
        *(pytest.param(Method.COUPLED, layers, marks=pytest.mark.slow) for layers in ((0, 1), (1, 3))),
        (Method.SPARSE, (0, 2, 3)),
    ],
    ids=str,
)
def test_texts_beside_each_other_are_cloud_onlys(
    backend: PagedBackend, method: Method, layers: tuple[int, ...], tmp_path: Path
) -> None:
    others = [load_head(make_heads(tmp_path / "medusa", "medusa"), backend), Lookahead(backend)]
    service = Service(backend, [exit_at(backend, layers), *others])  # type: ignore[list-item]
    sources = [(EARLY_EXIT, 4, False), (EARLY_EXIT, 9, False), (EARLY_EXIT, 16, True), (EARLY_EXIT, 1, False)]
    sources += [("medusa", 12, True), (CLOUD_ONLY, 0, False)]
    sources += [("lookahead", 16, True)] if method is Method.COUPLED else []
    num_accepted = 0
    for temperature in (0.0, 0.8):
        cases = [
            make_case(seed, source, temperature, num_nodes=num_nodes, is_tree=is_tree, method=method)
            for seed, (source, num_nodes, is_tree) in enumerate(sources)
        ]
        alone = [replace(case, source=CLOUD_ONLY, method=Method.COUPLED) for case in cases]
        wanted = [text.token_ids for text in service.write(alone, NUM_NEW)]
        for case, text, its in zip(cases, service.write(cases, NUM_NEW), wanted, strict=True):
            assert len(text.token_ids) == NUM_NEW
            if method is Method.COUPLED or temperature == 0:
                assert text.token_ids == its, case
            num_accepted += text.num_accepted if case.source == EARLY_EXIT else 0
    least = NUM_NEW if 0 in layers else 1  # the first layer is not left out with impunity
    assert num_accepted >= least, "what these layers chose was hardly ever accepted"
    assert backend.kv_usage.num_used == 0, "blocks are held of no session"


def test_kv_in_fp8_gives_cloud_onlys_texts(tmp_path: Path) -> None:
    directory = make_shallow_target(tmp_path / "target", "llama")
    backend = load_target(directory, kv_dtype="fp8", kv_bytes=16 << 20)
    service = Service(backend, [exit_at(backend, (0, 1, 3))])
    cases = [make_case(seed, EARLY_EXIT, 0.8, num_nodes=4, is_tree=False) for seed in range(3)]
    texts = service.write(cases, NUM_NEW)
    assert [text.token_ids for text in texts] == [cloud_only(service, case) for case in cases]
    assert sum(text.num_accepted for text in texts) > NUM_NEW // 2


def test_heads_beside_it_read_the_states_of_all_layers(tmp_path: Path) -> None:
    directory = make_tiny_target(tmp_path / "target")
    backend = load_target(directory, kv_bytes=64 << 20)
    layers = (0, 1, 3)  # below the exit, at it, and after the final norm
    knowing = KnowingHead(backend, Truth(directory, layers), "all", reads_all=True)
    knowing.facts = replace(knowing.facts, feature_layers=layers)
    backend.feature_layers = layers
    service = Service(backend, [exit_at(backend, (0, 1)), knowing])
    sources = [EARLY_EXIT, "all", EARLY_EXIT, "all"]
    cases = [make_case(seed, source, 0.8, num_nodes=4, is_tree=False) for seed, source in enumerate(sources)]
    texts = service.write(cases, NUM_NEW)
    assert [text.token_ids for text in texts] == [cloud_only(service, case) for case in cases]
    assert knowing.num_checked > NUM_NEW and not knowing.num_wrong


def rows_below(backend: PagedBackend, service: Service, case: Case) -> tuple[list[int], int]:
    """Returns the KV rows that each layer wrote for a text, and the steps that it took."""
    before = list(backend.num_kv_rows)
    (text,) = service.write([case], NUM_NEW)
    assert text.token_ids == cloud_only(service, case)
    before_alone = list(backend.num_kv_rows)
    cloud_only(service, case)
    alone = [after - each for after, each in zip(backend.num_kv_rows, before_alone, strict=True)]
    found = [after - each for after, each in zip(before_alone, before, strict=True)]
    return [each - its for each, its in zip(found, alone, strict=True)], text.num_steps


def test_kv_below_the_exit_is_written_once_a_token_and_above_it_by_the_forward_alone(
    backend: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(backend, [exit_at(backend, (0, 1))])
    case = make_case(2, EARLY_EXIT, 0.8, num_nodes=4, is_tree=False)
    rows, num_steps = rows_below(backend, service, case)
    assert rows[0] == rows[1] == rows[2] == rows[3], (
        "a token was run through the first layers twice, or never"
    )
    service = Service(backend, [exit_at(backend, (0, 2))])
    rows, num_steps = rows_below(backend, service, case)
    assert rows[0] == rows[1] == rows[3]
    assert rows[2] > rows[3] + num_steps, (
        "a layer after a gap writes for the draft, and again for the forward"
    )
    # The check can fail: without the states the forward runs all layers again.
    monkeypatch.setattr(Work, "forward_item", without_states(Work.forward_item))
    service = Service(backend, [exit_at(backend, (0, 1))])
    rows, num_steps = rows_below(backend, service, case)
    assert rows[0] == rows[1] > rows[2] + num_steps and rows[2] == rows[3]


def without_states(made: object) -> object:
    def item(work: Work, num_tokens: int, *, is_final: bool) -> ForwardItem:
        return replace(made(work, num_tokens, is_final=is_final), states=None)  # type: ignore[operator]

    return item


@pytest.mark.parametrize("counts", [None, (4, 8)], ids=str)
def test_a_forward_from_known_states_has_the_bits_of_one_from_the_tokens(
    backend: PagedBackend, counts: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is split into passes, and beside chains and a tree that begin with the first layer."""
    if counts is not None:
        monkeypatch.setattr(backend, "row_plan", RowPlan(counts) if backend.row_plan else None)
    if counts is not None and backend.row_plan is None:
        pytest.skip("products of any number of rows have the same bits")
    layers, drafted = (0, 1), [5, 17, 8, 99]
    exit_at(backend, layers)
    found = []
    for has_states in (False, True):
        sequence, chain, tree = (backend.new_sequence() for _ in range(3))
        backend.forward([ForwardItem(sequence, TEXT[:15], 0), ForwardItem(chain, TEXT[:7], 0)])
        backend.forward([ForwardItem(tree, TEXT[:18], 0)])
        states = None
        if has_states:
            assert backend.reserve(sequence, 5)
            tokens = [TEXT[15], *drafted[:-1]]
            rows = [
                backend.run_ahead([AheadToken(sequence, offset, token_id)], layers)
                for offset, token_id in enumerate(tokens)
            ]
            states = torch.cat([state for state, _ in rows])
            assert sequence.length == 15, "what runs ahead is no part of the sequence"
        items = [
            ForwardItem(chain, TEXT[7:13], 2),
            ForwardItem(sequence, [TEXT[15], *drafted], 5, states=states),
            ForwardItem(tree, [TEXT[18], 3, 4, 5], 4, [-1, 0, -1]),
        ]
        logits = backend.forward(items).copy()
        table = sequence.table  # type: ignore[attr-defined]
        slots = list(backend.blocks.slots(table, 0, sequence.length))
        kv = [pool.flatten(1, 2)[:, slots].clone() for pool in backend.memory.tensors]
        found.append((logits, kv))
        for each in (sequence, chain, tree):
            backend.close(each)
        backend.check_integrity()
    (plain, plain_kv), (entered, entered_kv) = found
    assert (plain == entered).all()
    assert all(torch.equal(*pair) for pair in zip(plain_kv, entered_kv, strict=True))


def test_what_runs_ahead_of_all_layers_chooses_what_the_target_chooses(backend: PagedBackend) -> None:
    exit_at(backend, (0, 1, 2))
    sequence = backend.new_sequence()
    backend.forward([ForwardItem(sequence, TEXT[:9], 0)])
    assert backend.reserve(sequence, 3)
    ahead = [backend.run_ahead([AheadToken(sequence, i, TEXT[9 + i])], (0, 1, 2, 3))[1] for i in range(2)]
    rows = backend.forward([ForwardItem(sequence, TEXT[9:11], 2)])
    assert (torch.cat(ahead).numpy() == rows).all()
    backend.close(sequence)


@pytest.mark.parametrize("layers", [(0, 1), (1, 3)], ids=str)
def test_texts_are_right_after_an_eviction_and_a_cached_prefix(
    backend: PagedBackend, layers: tuple[int, ...]
) -> None:
    service = Service(backend, [exit_at(backend, layers)])
    for seed in range(2):
        case = Case(make_prompt(1, 40), SamplingParams(seed=seed), EARLY_EXIT, 4, False)
        (text,) = service.write([case], NUM_NEW, is_evicted=True)
        assert text.token_ids == cloud_only(service, case)
        assert text.num_accepted


def test_sessions_that_have_to_give_way_write_the_same_texts(tmp_path: Path) -> None:
    """The pool has no room for both: one is refused in the middle of a generation, loses its KV and goes on later."""
    backend = load_target(make_shallow_target(tmp_path / "target", "llama"), kv_tokens=96)
    service = Service(backend, [exit_at(backend, (0, 1))])
    cases = [
        Case(make_prompt(seed, 30), SamplingParams(seed=seed), EARLY_EXIT, 8, False) for seed in range(2)
    ]
    engine, num_refused = service.engine, 0
    replies: list[list[SessionResponse]] = [[], []]

    def submit(seed: int, request: Any) -> None:
        engine.submit(Job(bytes([seed]) * 16, request, replies[seed].append, 0))

    for seed, case in enumerate(cases):
        prompt = case.prompt
        submit(
            seed,
            OpenRequest(
                bytes([seed]) * 16, prompt, 30, case.sampling, ignore_eos=True, draft_source=EARLY_EXIT
            ),
        )
    for round_id in range(1, 40):
        while engine.step() or engine.num_jobs:
            engine.check_integrity()
        num_refused += sum(isinstance(each[-1], RoundError) for each in replies)
        left = {session: 30 + NUM_NEW - session.chain.position for session in engine.sessions}
        if not any(left.values()):
            break
        for session, num_left in left.items():
            chain, seed = session.chain, session.opening.session_id[0]
            if num_left:
                submit(
                    seed,
                    GenerateRequest(
                        round_id,
                        chain.position,
                        chain.hash,
                        num_left,
                        is_co_located=True,
                        num_speculative_tokens=8,
                    ),
                )
    texts = {session.opening.session_id[0]: session.chain.token_ids[30:] for session in engine.sessions}
    for session in list(engine.sessions):
        engine.sessions.forget(session)
    assert num_refused and texts == {seed: cloud_only(service, case) for seed, case in enumerate(cases)}


def test_slots_that_are_not_there_are_not_reserved(backend: PagedBackend) -> None:
    sequence, num_tokens = backend.new_sequence(), backend.num_free_tokens
    backend.forward([ForwardItem(sequence, TEXT[:50], 0)])
    assert not backend.reserve(sequence, num_tokens) and backend.reserve(sequence, 100)
    backend.check_integrity()
    backend.release_reserved(sequence)
    assert backend.kv_usage.num_used == 4
    backend.close(sequence)
    backend.release_reserved(sequence)  # of a closed one there is nothing to release
    assert backend.kv_usage.num_used == 0


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_generation_that_ends_between_draft_and_forward_leaves_nothing_behind(
    backend: PagedBackend, is_closed: bool
) -> None:
    service = Service(backend, [exit_at(backend, (0, 1))])
    engine, session_id, replies = service.engine, b"x" * 16, list[SessionResponse]()
    sampling, prompt = SamplingParams(seed=3), make_prompt(3, 20)

    def submit(request: object) -> None:
        engine.submit(Job(session_id, request, replies.append, 0))  # type: ignore[arg-type]

    submit(OpenRequest(session_id, prompt, len(prompt), sampling, ignore_eos=True, draft_source=EARLY_EXIT))
    engine.step()
    opened = replies[-1]
    submit(GenerateRequest(1, opened.position, opened.hash, 20, is_co_located=True, num_speculative_tokens=5))  # type: ignore[union-attr]
    engine._admit_arrived()
    works = list(engine.sessions.active.values())
    assert engine.drafter is not None
    engine.drafter.draft_for(works, backend.max_context, engine.sessions.isolate)
    (work,) = works
    assert work.known_states is not None and len(work.known_states.rows) == len(work.draft_tokens) == 5
    (session,) = engine.sessions
    submit(CloseRequest() if is_closed else CancelRequest(1))
    while engine.step() or engine.num_jobs:
        pass
    engine.check_integrity()
    if is_closed:
        assert backend.kv_usage.num_used == 0
        return
    assert session.kv is not None and session.kv_length == len(prompt)
    assert session.kv.table.num_reserved == 0  # type: ignore[attr-defined]
    submit(GenerateRequest(2, opened.position, opened.hash, NUM_NEW - 1))  # type: ignore[union-attr]
    while engine.step() or engine.num_jobs:
        pass
    engine.check_integrity()
    wanted = cloud_only(service, Case(prompt, sampling, CLOUD_ONLY))
    assert session.chain.token_ids[len(prompt) :] == wanted
    engine.sessions.forget(session)


def test_states_of_other_kv_than_the_sessions_are_left_out(backend: PagedBackend) -> None:
    service = Service(backend, [exit_at(backend, (0, 1))])
    engine, session_id, replies = service.engine, b"y" * 16, list[SessionResponse]()
    prompt = make_prompt(4, 20)
    opening = OpenRequest(session_id, prompt, len(prompt), SamplingParams(seed=4), ignore_eos=True)
    engine.submit(Job(session_id, opening, replies.append, 0))
    engine.step()
    (session,) = engine.sessions
    assert session.kv is not None
    work = Work(session, Job(session_id, opening, replies.append, 0), opening, draft_tokens=(1, 2))
    states = torch.zeros(2, 128)
    work.known_states = KnownStates(session.kv, session.kv.length, states)
    assert work.forward_item(3, is_final=True).states is states
    assert work.forward_item(1, is_final=False).states is None
    work.known_states = KnownStates(session.kv, session.kv.length - 1, states)
    assert work.forward_item(3, is_final=True).states is None
    other = backend.new_sequence()
    work.known_states = KnownStates(other, session.kv.length, states)
    assert work.forward_item(3, is_final=True).states is None
    backend.close(other)
    engine.sessions.forget(session)


def test_a_draft_that_fails_ends_no_other(
    backend: PagedBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = exit_at(backend, (0, 1))
    service = Service(backend, [source])
    cases = [make_case(seed, EARLY_EXIT, 0.8, num_nodes=4, is_tree=False) for seed in range(3)]
    wanted = [cloud_only(service, case) for case in cases]
    made = source.sequence

    def sequence(sampling: SamplingParams, **fields: object) -> object:
        found = made(sampling, **fields)  # type: ignore[arg-type]
        if sampling.seed == 1:
            monkeypatch.setattr(found, "_sample", lambda *_: 1 / 0)
        return found

    monkeypatch.setattr(source, "sequence", sequence)
    texts = service.write(cases, NUM_NEW)
    assert [text.token_ids for text in texts] == wanted
    assert [bool(text.num_accepted) for text in texts] == [True, False, True]
    assert caplog.text.count("goes on with the target alone") == 1


def test_a_run_that_fails_leaves_the_generations_to_the_target(
    backend: PagedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exit_at(backend, (0, 1))
    service = Service(backend, [source])
    cases = [make_case(seed, EARLY_EXIT, 0.8, num_nodes=4, is_tree=False) for seed in range(2)]
    wanted = [cloud_only(service, case) for case in cases]
    run, left = backend.run_ahead, [0] * 10

    def run_ahead(*arguments: object) -> object:
        left.pop()  # an IndexError, in the middle of the third draft
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "run_ahead", run_ahead)
    texts = service.write(cases, NUM_NEW)
    assert [text.token_ids for text in texts] == wanted
    assert not left and backend.kv_usage.num_used == 0


def test_a_tree_that_is_asked_for_is_a_short_chain(backend: PagedBackend) -> None:
    service = Service(backend, [exit_at(backend, (0, 1))])
    drafted: list[int] = []
    finish = service.engine._finisher.finish

    def note(work: Work, *rest: object) -> bool:
        drafted.append(len(work.draft_tokens))
        assert work.tree is None
        return finish(work, *rest)  # type: ignore[arg-type]

    service.engine._finisher.finish = note  # type: ignore[assignment, method-assign]
    service.write([make_case(1, EARLY_EXIT, 0.0, num_nodes=16, is_tree=True)], NUM_NEW)
    assert max(drafted) == DEFAULT_CHAIN


def test_a_directory_names_layers_and_has_no_weights(backend: PagedBackend, tmp_path: Path) -> None:
    directory = write_directory(
        tmp_path / "exit", layers=[0, 1, 3], target_fingerprint=backend.facts.files_fingerprint
    )
    head = load_head(directory, backend)
    assert isinstance(head, EarlyExit)
    assert (head.name, head.layers, backend.entry_layer) == (EARLY_EXIT, (0, 1, 3), 2)
    assert [num_first(layers) for layers in ((0,), (1, 2), (0, 1, 2), (0, 2, 3))] == [1, 0, 3, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "layers is None; want numbers of layers, ascending"),
        ({"layers": []}, r"layers is \[\]; want"),
        ({"layers": [1, 0]}, r"layers is \[1, 0\]; want numbers of layers, ascending"),
        ({"layers": [0, 0]}, "ascending"),
        ({"layers": [0, True]}, "want numbers of layers"),
        ({"layers": [0, 4]}, "want some of 0 to 3, and not all"),
        ({"layers": [-1, 0]}, "want some of 0 to 3, and not all"),
        ({"layers": [0, 1, 2, 3]}, "want some of 0 to 3, and not all"),
        ({"layers": [0], "target_fingerprint": "f" * 64}, "trained for the target ffffffffffff"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(
    backend: PagedBackend, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    directory = write_directory(tmp_path / "exit", **fields)
    with pytest.raises(OutriderError, match=message) as caught:
        load_head(directory, backend)
    assert f"--heads {directory}" in str(caught.value)


@pytest.mark.parametrize("decoder", ["cuda", "transformers"])
def test_other_decoders_are_refused_by_name(decoder: str, tmp_path: Path) -> None:
    other = load_target(make_tiny_target(tmp_path / "target"), kv_bytes=8 << 20, decoder=decoder)
    with pytest.raises(OutriderError, match="early exit wants our own decoder on a CPU"):
        load_head(write_directory(tmp_path / "exit", layers=[0]), other)
