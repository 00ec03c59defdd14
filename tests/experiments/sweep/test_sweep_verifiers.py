"""What the verifiers of a sweep are started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.experiments.sweep import verifiers
from outrider.experiments.sweep.config.schema import SweepConfig
from outrider.models import EMBEDDED


def test_a_verifier_is_given_the_drafts_that_it_can_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(verifiers, "start_verifier", lambda *flags, target: started.append(flags))
    (tmp_path / "config.json").write_text("{}")  # a Hugging Face directory: the edges' alone
    for draft in (EMBEDDED / "draft", tmp_path):
        verifiers.VerifierPool(SweepConfig(models={"draft": str(draft)}))._start(0.0, False)
    assert [str(EMBEDDED / "draft") in flags for flags in started] == [True, False]
    assert not any(str(tmp_path) in flags for flags in started)
