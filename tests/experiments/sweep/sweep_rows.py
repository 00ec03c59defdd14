"""Rows of a results folder with defaults, for tests of what is made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.sweep.config.cells import Cell
from outrider.experiments.sweep.observing import token_hash
from outrider.experiments.sweep.results.records import RequestRow, RoundRow, VisitRow


def make_request(cell: str = "c", repeat: int = 0, prompt: str = "p", **changes: Any) -> RequestRow:
    """Two tokens, at 10 and 20 ms, unless told otherwise."""
    times = changes.pop("token_times_ms", [10.0, 20.0])
    ids = changes.pop("token_ids", list(range(len(times))))
    row = RequestRow(
        cell=cell,
        request=f"{cell}/{repeat}/0/{prompt}",
        repeat=repeat,
        session=0,
        prompt=prompt,
        seed=1 + repeat,
        started_s=0.0,
        link_age_ms=0.0,
        num_prompt_tokens=3,
        num_tokens=len(ids),
        finish_reason="length",
        token_ids=ids,
        token_hash=token_hash(ids),
        token_times_ms=times,
        commit_times_ms=sorted(set(times)),
        token_origins=["target"] * len(ids),
        ttft_ms=times[0] if times else None,
        tpot_ms=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None,
        total_ms=times[-1] if times else None,
        otps=1e3 * len(times) / times[-1] if times else None,
        num_rounds=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        verifier_calls=2,
        forward_s=0.02,
        cloud_draft_s=0.0,
        bytes_up=100,
        bytes_down=200,
        num_unverified_tokens=0,
        num_fallback_tokens=0,
        num_approximate_tokens=0,
        num_timeouts=0,
        num_reconnects=0,
        num_rebuilds=0,
        num_refusals=0,
        open_ms=5.0,
    )
    return dataclasses.replace(row, **changes)


def make_round(drafted: int, accepted: int, cell: str = "c", **changes: Any) -> RoundRow:
    row = RoundRow(
        cell=cell,
        request=f"{cell}/0/0/p",
        round=0,
        at_ms=20.0,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        la_over_k=accepted / drafted if drafted else 0.0,
        alpha_mean=None,
        draft_ms=1.0 * drafted,
        rtt_ms=20.0,
        net_ms=12.0,
        queue_ms=1.0,
        forward_ms=6.0,
        verifier_ms=8.0,
        batch_size=1,
        bytes_up=50,
        bytes_down=60,
    )
    return dataclasses.replace(row, **changes)


def make_visit(cell: str = "c", repeat: int = 0, **changes: Any) -> VisitRow:
    row = VisitRow(cell=cell, repeat=repeat, wall_s=0.5, num_requests=1, num_tokens=2)
    return dataclasses.replace(row, **changes)


def make_cell(mode: str = "speculative", **changes: Any) -> Cell:
    cell = Cell(
        link=LinkProfile(),
        mode=mode,
        depth_policy="fixed",
        num_speculative_tokens=4,
        method="coupled",
        tls=False,
        temperature=0.8,
        num_sessions=1,
        min_forward_ms=0.0,
        min_draft_ms=0.0,
    )
    return dataclasses.replace(cell, **changes)
