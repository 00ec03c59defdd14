"""An edge whose draft is synthetic, for everything that runs sessions from a configuration."""

from __future__ import annotations

from typing import cast

from outrider.edge_client.config.run_config import RunConfig
from outrider.edge_client.session.factory import Edge
from outrider.edge_client.tokenization.tokenizer import EdgeTokenizer
from outrider.experiments.synthetic.draft import SyntheticDraft, SyntheticTokenizer
from outrider.experiments.synthetic.pair import SyntheticPair


def create_synthetic_edge(config: RunConfig, pair: SyntheticPair) -> Edge:
    """Returns an edge as `outrider.edge_client.session.factory.create_edge` does; the configuration's
    draft and strategy are not used."""
    draft = SyntheticDraft(pair) if config.mode.has_draft else None
    tokenizer = cast(EdgeTokenizer, SyntheticTokenizer())
    slowed = (f"min-draft-ms={config.min_draft_ms:g}",) if draft and config.min_draft_ms else ()
    return Edge(config, tokenizer, draft, 0.0, (*slowed, *pair.labels))
