"""The product over links of long round trips, as sweeps found it."""

from __future__ import annotations

import pytest

from outrider.edge_client.transport.link.channel import open_channel
from outrider.experiments.links.base import create_realisation
from outrider.experiments.links.profiles import LinkProfile
from outrider.experiments.shared.processes import start_server
from outrider.experiments.synthetic.pair import SyntheticPair
from outrider.experiments.synthetic.serve import serve_command


@pytest.mark.parametrize("rtt_ms", [250.0])
def test_a_link_whose_round_trip_outlasts_grpcs_back_off_can_be_dialled(rtt_ms: float) -> None:
    verifier = start_server(serve_command(SyntheticPair()))
    try:
        profile = LinkProfile("far", rtt_ms=rtt_ms)
        with create_realisation("proxy").open(profile, verifier.address) as link:
            open_channel(link.address, 10.0).close()
    finally:
        verifier.stop()
