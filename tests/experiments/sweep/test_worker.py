"""An edge's process: what its jobs share and what they do not."""

from __future__ import annotations

from outrider.edge_client.config.run_config import run_config
from outrider.experiments.sweep.worker import _Edges


def test_requests_share_what_texts_taught_only_under_the_same_name() -> None:
    edges, config = _Edges(), run_config(mode="cloud-only")  # which loads no draft
    first, again = (edges.get(config, None, "one").acceptance_prior for _ in range(2))
    assert first is again
    assert edges.get(config, None, "other").acceptance_prior is not first
    alone = edges.get(config, None).acceptance_prior
    assert alone is not first and edges.get(config, None).acceptance_prior is not alone
