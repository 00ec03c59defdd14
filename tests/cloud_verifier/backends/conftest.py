"""Random targets, built once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models import WINDOWED, make_tiny_target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small for two threads to help, and waiting threads burn whole cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def build(arch: str) -> Path:
        if arch not in made:
            made[arch] = make_tiny_target(
                tmp_path_factory.mktemp("targets") / arch, arch, **WINDOWED.get(arch, {})
            )
        return made[arch]

    return build
