"""A verify step of a 7B shape: its time beside one read of the weights, its dispatcher calls and its launches."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_check.shape import (
    SHAPE_7B,
    SHAPE_TOY,
    close_all,
    make_facts,
    make_model,
    open_sequences,
)
from benchmarks.gpu_check.stage import Report, Setting
from benchmarks.gpu_check.variants import DECODERS, Decoder, NotHere
from outrider.cloud_verifier.backends.base import ForwardItem, KVSequence
from outrider.cloud_verifier.backends.paged_backend import PagedBackend
from outrider.cloud_verifier.engine.finish import make_rows
from outrider.cloud_verifier.verification.device_rows import make_staged_rows, stage_rounds
from outrider.cloud_verifier.verification.rows import ProcessedRows, StepRound
from outrider.common.types import SamplingParams
from outrider.experiments.shared.results import at_most

NUM_ROWS = 5  # a session's: four drafted tokens and the bonus
SESSIONS, CONTEXTS = (1, 4, 16, 64), (512, 4096)
COUNTED_SESSIONS, COUNTED_CONTEXT = 64, 300
JUDGED_SESSIONS = (1, 16)
VERIFYING = "exact"  # the decoder whose steps are compared with those of cloud-only
NUM_SHOWN = 10  # of the kernels that took longest
# Id, the two decoders, the most that the ratio of their times may be, and what it is.
COMPARED: tuple[tuple[str, tuple[str, str], float | None, str], ...] = (
    ("gpu.graph", ("graphs", "eager"), 0.4, "with CUDA graphs : without"),
    ("gpu.exact_cost", ("exact", "graphs"), 1.25, "with exact rows : without"),
    ("gpu.fp8_cost", ("exact_fp8_kv", "exact"), None, "with the KV pool in FP8 : in bfloat16, exact rows"),
)


class CallCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the operations that reach torch's dispatcher, and those among them that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_calls = 0
        self.num_computing = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        self.num_computing += not getattr(func, "is_view", False)
        return func(*args, **(kwargs or {}))


def run(setting: Setting, report: Report) -> None:
    """Measures every decoder over the same weights."""
    shape, dtype = setting.pick(SHAPE_7B, SHAPE_TOY), setting.dtype()
    model, facts = make_model(setting, shape, dtype), make_facts(setting, shape, dtype)
    read = sum(each.numel() * each.element_size() for each in model.parameters())
    read -= model.get_input_embeddings().weight.numel() * dtype.itemsize  # of which a step reads few rows
    floor_ms = read / 1e6 / setting.copy_gbps()
    report.note(weight_bytes=read, floor_ms=floor_ms)
    kv_tokens = setting.pick(max(SESSIONS) * (max(CONTEXTS) + 256), COUNTED_SESSIONS * 512)
    step_ms: dict[tuple[str, int], float] = {}  # by decoder and sessions, over the shortest context
    for name, decoder in DECODERS.items():
        try:
            backend = decoder.make(model, facts, kv_tokens)
        except NotHere as reason:
            report.skip(name, str(reason))
            continue
        if not setting.is_rehearsal:
            report.note(has_device_logits=backend.has_device_logits, block_size=backend.blocks.block_size)
        _run_decoder(setting, report, backend, name, decoder, floor_ms, step_ms)
        del backend  # its pool goes before the next one's comes
        gc.collect()
    for num_sessions in setting.pick(SESSIONS, (2,)):
        for id, names, most, what in COMPARED:
            one, other = (step_ms.get((name, num_sessions)) for name in names)
            if one and other:
                what = f"step of {num_sessions} x 5 rows {what}"
                target = at_most(most) if most and num_sessions in JUDGED_SESSIONS else None
                report.figure(f"{id}.{num_sessions}", what, one / other, "ratio", target)


def _run_decoder(
    setting: Setting,
    report: Report,
    backend: PagedBackend,
    name: str,
    decoder: Decoder,
    floor_ms: float,
    step_ms: dict[tuple[str, int], float],
) -> None:
    num_sessions = setting.pick(COUNTED_SESSIONS, 8)
    counted = open_step(backend, num_sessions, COUNTED_CONTEXT, counts_rows=False)
    for _ in range(setting.pick(2, 0)):
        counted.run()  # what is captured once is not counted
    with CallCounter() as counter:
        counted.run()
    counted.close()
    what = f"of the dispatcher in a forward, views left out, {num_sessions} sessions x 5 rows, {name}"
    target = at_most(decoder.max_calls) if decoder.max_calls else None
    report.figure(f"gpu.dispatch.{name}", what, counter.num_computing, "calls", target)
    for context in setting.pick(CONTEXTS, (COUNTED_CONTEXT,)):
        for num_sessions in setting.pick(SESSIONS, (2,)):
            if setting.seconds_left < 10:
                report.skip(f"{name} {num_sessions} x {context}", "the stage's time is over")
                continue
            step = open_step(backend, num_sessions, context)
            ms, forward_ms = setting.wall_ms(step.run), setting.wall_ms(step.forward)
            profile = _profile(setting, report, step.run)
            step.close()
            found = {"step_ms": ms, "forward_ms": forward_ms, **profile}
            report.note(**{f"{name}_{num_sessions}x{context}": found})
            if context == CONTEXTS[0] or setting.is_rehearsal:
                step_ms[name, num_sessions] = ms
                is_judged = num_sessions in JUDGED_SESSIONS
                what = (
                    f"step of {num_sessions} x 5 rows over {context} tokens : one read of the weights, {name}"
                )
                target = at_most(decoder.max_ratio) if is_judged and decoder.max_ratio else None
                report.figure(f"gpu.step7b.{name}.{num_sessions}", what, ms / floor_ms, "ratio", target)
                if name == VERIFYING:
                    one = open_step(backend, num_sessions, context, num_rows=1)
                    cost = ms / setting.wall_ms(one.run)
                    one.close()
                    what = f"step of {num_sessions} x 5 rows over {context} tokens : of 1 row each, {name}"
                    report.figure(f"gpu.verify_cost.{num_sessions}", what, cost, "ratio")


class Step:
    """Runs the same step again and again: a forward of a few rows of each session, then their samples."""

    def __init__(
        self,
        backend: PagedBackend,
        sequences: Sequence[KVSequence],
        context: int,
        num_rows: int,
        counts_rows: bool,
    ) -> None:
        self._backend, self._sequences, self._context = backend, sequences, context
        ids = [[(7 * i + j) % backend.num_tokens for j in range(num_rows)] for i in range(len(sequences))]
        self._items = [ForwardItem(each, row, num_rows) for each, row in zip(sequences, ids, strict=True)]
        self._rounds = [
            StepRound(SamplingParams(temperature=0.8, seed=i), context, (), (), tuple(row[1:]))
            for i, row in enumerate(ids)
        ]
        self._has_rows = counts_rows

    def forward(self) -> Any:
        """Runs the forward alone; the KV that it wrote is dropped."""
        logits = self._backend.forward(self._items)
        for sequence in self._sequences:
            self._backend.truncate(sequence, self._context)
        return logits

    def run(self) -> None:
        """Runs the forward, and has each row sampled."""
        if not self._has_rows:
            self.forward()
            return
        staging, num_tokens = self._backend.staging, self._backend.num_tokens
        rows: Sequence[ProcessedRows]
        if staging is None:
            rows = make_rows(self.forward(), self._rounds, (), num_tokens)
        else:
            staged = stage_rounds(self._rounds, num_tokens, staging)
            rows = make_staged_rows(self.forward(), staged, ())
        for each in rows:
            each.target_sample(0)

    def close(self) -> None:
        """Gives the KV back."""
        close_all(self._backend, self._sequences)


def open_step(
    backend: PagedBackend,
    num_sessions: int,
    context: int,
    num_rows: int = NUM_ROWS,
    counts_rows: bool = True,
) -> Step:
    """Returns the step of sequences whose contexts are so long."""
    return Step(backend, open_sequences(backend, num_sessions, context), context, num_rows, counts_rows)


def _profile(setting: Setting, report: Report, run: Callable[[], None]) -> dict[str, Any]:
    """Returns what the device did in one step, and in which kernels it was busy longest; nothing where its profiler
    does not work."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if setting.is_rehearsal else ProfilerActivity.CUDA
    try:
        with profile(activities=[activity]) as profiler:
            run()
            setting.synchronize()
        events = [each for each in profiler.events() or () if each.device_type.name == activity.name]
        busy_us: Counter[str] = Counter()
        for each in events:
            busy_us[each.name[:60]] += each.time_range.elapsed_us()
    except (
        Exception
    ) as error:  # its library is missing, too old or not permitted: each is reported in another way
        report.skip("profiler", str(error)[:200])
        return {}
    longest = {name: round(us) for name, us in busy_us.most_common(NUM_SHOWN)}
    return {
        "num_launches": len(events),
        "busy_ms": round(busy_us.total() / 1e3, 3),
        "longest_us": longest,
    }
