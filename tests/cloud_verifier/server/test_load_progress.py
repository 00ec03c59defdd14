"""How a person sees that weights are being loaded."""

from __future__ import annotations

import logging

import pytest

from outrider.cloud_verifier.server.load_progress import LoadProgress

GIB = 2**30


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_log_has_a_line_every_ten_seconds_and_none_of_what_is_loaded_sooner(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "outrider"), LoadProgress("7B", clock) as progress:
        for now_s in (1, 9, 10, 11, 19.9, 20):
            clock.now_s = now_s
            progress(int(now_s * GIB / 2), 14 * GIB)
    assert caplog.messages == ["loading 7B: 5GiB of 14GiB", "loading 7B: 10GiB of 14GiB"]


def test_a_terminals_line_is_changed_in_place_and_removed_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with LoadProgress("7B", clock) as progress:
        for now_s in (0.05, 0.1, 0.15, 0.2):
            clock.now_s = now_s
            progress(int(now_s * 10 * GIB), 14 * GIB)
    clear = "\r\x1b[K"
    assert (
        capsys.readouterr().err == f"{clear}loading 7B: 1GiB of 14GiB{clear}loading 7B: 2GiB of 14GiB{clear}"
    )
