"""The daemon without HTTP: what a reload takes up, what is known of the target, what a stop cancels."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from outrider.cloud_verifier.server.server import VerifierServer
from outrider.common.config.loader import Loaded, with_values
from outrider.common.errors import OutriderError
from outrider.edge_client.config.run_config import RunConfig, run_config
from outrider.edge_client.daemon.openai.choices import Plan
from outrider.edge_client.daemon.openai.errors import ApiError
from outrider.edge_client.daemon.service import Daemon

NOWHERE = "127.0.0.1:9"


class Reloaded:
    """A daemon, and the configuration that it loads next."""

    def __init__(self) -> None:
        self.config = run_config(verifier=NOWHERE)
        self.daemon = Daemon(lambda: Loaded(self.config, {}))

    def reload(self, **values: object) -> list[str]:
        self.config = run_config(verifier=NOWHERE, **values)
        return self.daemon.reload()


@pytest.fixture(scope="module")
def reloaded() -> Iterator[Reloaded]:
    made = Reloaded()
    yield made
    made.daemon.close()


@pytest.mark.parametrize(
    "values",
    [
        {"gate": "stop"},
        {"gate_nll": 1.0},
        {"gate": "stop", "gate_variance": 1.0},  # the draft that is loaded does not tell it
        {"temperature": -3.0},
        {"stop_token_id": (99_999_999,)},
        {"pipeline": "on", "mode": "cloud-only"},
        {"logit_bias": ("x",)},
        {"regex": "("},
        {"method": "sparse", "num_candidates": 3},
        {"tree": 8, "num_speculative_tokens": 4},
    ],
)
def test_a_reload_refuses_what_a_start_does_and_changes_nothing(
    reloaded: Reloaded, values: dict[str, object]
) -> None:
    before = reloaded.daemon.config
    with pytest.raises(OutriderError):
        reloaded.reload(**values)
    assert reloaded.daemon.config is before is reloaded.daemon.edge.config


def test_a_reload_takes_up_the_level_of_the_log(reloaded: Reloaded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "outrider")  # which it has again afterwards
    assert reloaded.reload(log_level="debug") == []
    assert logging.getLogger("outrider").level == logging.DEBUG


def test_the_targets_own_name_is_known_before_anybody_asked_for_it(
    reloaded: Reloaded, verifier: VerifierServer
) -> None:
    daemon = reloaded.daemon
    with pytest.raises(ApiError) as caught:
        asyncio.run(daemon.check_model("another"))
    assert (caught.value.status, caught.value.code) == (503, "verifier_unreachable"), "nobody knows yet"
    reloaded.config = with_values(RunConfig(), verifier=f"127.0.0.1:{verifier.port}")
    daemon.reload()
    target = verifier.engine.model.model_id
    asyncio.run(daemon.check_model(target))
    with pytest.raises(ApiError) as caught:
        asyncio.run(daemon.check_model("another"))
    assert caught.value.status == 404


def test_a_stop_cancels_the_scoring_of_prompts(reloaded: Reloaded) -> None:
    daemon, config = reloaded.daemon, run_config(verifier=NOWHERE)
    scoring = daemon.scoring(Plan(config, ()))
    threading.Timer(0.2, daemon.activity.cancel_all).start()
    with pytest.raises(ApiError, match="stopping"):
        daemon.score(scoring, (1, 2, 3))
    assert not daemon.activity.scorings
