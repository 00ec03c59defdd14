"""What sessions over `engine_link` are drawn from: their runs, and the faults that meet them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from support.edge.engine_link import Chances

from outrider.common.types import StopParams

FAULTS = Chances(  # a text of 50 tokens meets most of them
    ripe=0.4,
    lose_connection=0.05,
    lose_answer=0.05,
    duplicate=0.1,
    late_older=0.1,
    refuse=0.05,
    lose_kv=0.05,
    lose_session=0.02,
)
ANY_SEED, GREEDY_OR_SAMPLED = st.integers(0, 10**6), st.sampled_from([0.0, 0.8])


def run_fields(
    max_window: int, accuracies: tuple[float, ...], short_context: int, **of_stop: st.SearchStrategy[Any]
) -> dict[str, st.SearchStrategy[Any]]:
    """For `st.fixed_dictionaries`. `of_stop` are further fields of its `StopParams`."""
    return {
        "window": st.integers(1, max_window),
        "depth": st.integers(0, 6),
        "accuracy": st.sampled_from(accuracies),
        "seed": ANY_SEED,
        "temperature": GREEDY_OR_SAMPLED,
        "draft_context": st.sampled_from([short_context, 1000]),
        "stop": st.builds(
            StopParams,
            max_new_tokens=st.integers(1, 80),  # at times more than the context takes
            stop_token_ids=st.sampled_from([(), (9,), (4, 11)]),
            ignore_eos=st.booleans(),
            **of_stop,
        ),
    }
