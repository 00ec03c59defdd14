"""The floor of a message: an echo server of each kind answers, and its time is counted."""

from __future__ import annotations

import pytest

from outrider.experiments.message_floor import measure


@pytest.mark.parametrize("name", ["two_tasks", "protobuf"])
def test_an_echo_costs_processor_time(name: str) -> None:
    cost = measure(name, num_streams=2, num_connections=1, seconds=0.2)
    assert cost.messages_per_s > 0
    assert 0 < cost.grpc_us < cost.us
