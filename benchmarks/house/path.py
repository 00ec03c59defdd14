"""Follows one `VerifyRequest` through a verifier on loopback: the files it passes from the stream to the reply.

A file counts where one of its functions is called with an object that carries the request or its answer, in the
order of the calls. A file that comes again after another one is a return.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from types import FrameType
from typing import Any

from outrider.cloud_verifier.config import ServeConfig
from outrider.common.types import Draft
from outrider.edge_client.config.run_config import run_config
from outrider.experiments.synthetic.draft import SyntheticDraft, SyntheticSequence, create_synthetic_edge
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import create_server

TRACED_ROUND = 4
_CARRIERS = frozenset(
    "VerifyRequest SessionRequest VerifyResponse SessionResponse RoundError Job Work Draft Verdict Reply Share "
    "ForwardItem ProcessedRows Rows AdmissionTicket Decision Outcome Finished".split()
)
_FOLDERS = ("cloud_verifier/", "kernels/", "common/codec/requests_in", "common/codec/responses_out")


class _Tracer:
    """Records the files that are called with a carrier, in their order, between `start` and `stop`."""

    def __init__(self) -> None:
        self.stays: list[str] = []
        self._is_on = False

    def start(self) -> None:
        self._is_on = True

    def stop(self) -> None:
        self._is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._is_on or event != "call":
            return
        name = frame.f_code.co_filename.partition("/outrider/")[2]
        if not name.startswith(_FOLDERS) or (self.stays and self.stays[-1] == name):
            return
        given = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
        if any(_is_carrier(frame.f_locals.get(each)) for each in given if each != "self"):
            self.stays.append(name)


def _is_carrier(value: object) -> bool:
    if isinstance(value, list | tuple | dict) and value:
        value = next(iter(value))
    return type(value).__name__ in _CARRIERS


def trace_path() -> list[str]:
    """Returns the files in the order of their stays, for one round of a synthetic pair over a real stream."""
    tracer = _Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        asyncio.run(_serve_one_text(tracer))
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    return tracer.stays


async def _serve_one_text(tracer: _Tracer) -> None:
    pair = SyntheticPair((0.7,))
    config = ServeConfig(listen="127.0.0.1:0", admin_listen="none")
    async with create_server(pair, config) as server:
        await asyncio.to_thread(_decode, pair, f"127.0.0.1:{server.port}", tracer)


def _decode(pair: SyntheticPair, address: str, tracer: _Tracer) -> None:
    config = run_config(
        verifier=address,
        max_new_tokens=40,
        temperature=0.0,
        on_timeout="wait",
        mode="speculative",
        pipeline="off",
        num_speculative_tokens=4,
    )
    edge = create_synthetic_edge(config, pair)
    edge.draft = _TracedDraft(pair, tracer)
    with contextlib.closing(edge):
        for _ in edge.session("x", seed=1).generate():
            pass


class _TracedDraft(SyntheticDraft):
    """Switches the tracer on when the draft of round `TRACED_ROUND` is ready, and off when the next one begins."""

    def __init__(self, pair: SyntheticPair, tracer: _Tracer) -> None:
        super().__init__(pair)
        self._tracer = tracer

    def sequence(self, *args: Any, **kwargs: Any) -> SyntheticSequence:
        sequence = super().sequence(*args, **kwargs)
        propose, tracer, num_proposed = sequence.propose, self._tracer, 0

        def traced(*given: Any, **named: Any) -> Draft:
            nonlocal num_proposed
            tracer.stop()
            draft = propose(*given, **named)
            num_proposed += 1
            if num_proposed == TRACED_ROUND:
                tracer.start()
            return draft

        sequence.propose = traced  # type: ignore[method-assign]
        return sequence
