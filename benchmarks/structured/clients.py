"""A verifier of its own, and a client of it in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from outrider.edge_client.library.client import Client, connect
from outrider.experiments.shared.processes import start_verifier
from outrider.experiments.shared.prompts import load_prompts
from outrider.models import EMBEDDED


@contextmanager
def serving_client(**settings: Any) -> Iterator[Client]:
    """Yields a client with these settings; its verifier ends with it."""
    verifier = start_verifier(target=EMBEDDED / "target")
    try:
        with closing(connect(verifier.address, **settings)) as client:
            yield client
    finally:
        verifier.stop()


def load_texts() -> list[str]:
    """Returns held-out prompts."""
    return [prompt.text for prompt in load_prompts(EMBEDDED / "prompts.jsonl")]
