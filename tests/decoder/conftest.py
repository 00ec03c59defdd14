"""Small random targets, and decoders of them and of the embedded pair that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import make_tiny_target
from support.processes.server import serving

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.server.loading import load_models
from outrider.decoder.config import SpeculativeConfig
from outrider.decoder.decoder import SpeculativeDecoder
from outrider.edge_client.drafting.export.exporter import export_draft
from outrider.models import EMBEDDED


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("decoder") / "target", max_context=256)


@pytest.fixture(scope="session")
def tiny_draft(tiny: Path) -> Path:
    out = tiny.parent / "draft"
    export_draft(tiny, out)
    return out


@pytest.fixture(scope="session")
def embedded() -> Iterator[SpeculativeDecoder]:
    """The embedded pair in this process; tests give their own configuration to each call."""
    with SpeculativeDecoder() as decoder:
        decoder.setup(EMBEDDED / "target", SpeculativeConfig(), device="cpu")
        yield decoder


@pytest.fixture(scope="session")
def remote(tiny: Path) -> Iterator[str]:
    """A verifier of the tiny target that serves lookahead, and an early exit after one layer."""
    exit_dir = tiny.parent / "exit"
    exit_dir.mkdir()
    (exit_dir / "config.json").write_text('{"outrider": {"kind": "early_exit", "layers": [0]}}')
    config = ServeConfig(target=tiny, draft="none", heads=(str(exit_dir),), lookahead=True)
    backend, drafter = load_models(config, None)
    with serving(backend, config, drafter) as server:
        yield f"grpc://127.0.0.1:{server.port}"
