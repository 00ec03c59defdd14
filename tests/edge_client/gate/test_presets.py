"""The preset `big-little`: what it sets, what it refuses, and that it is named approximate."""

from __future__ import annotations

import math

import pytest

from outrider.common.errors import UsageError
from outrider.common.types import Method
from outrider.edge_client.config.gate import gate_settings
from outrider.edge_client.config.methods import check_method, make_method_params, warning
from outrider.edge_client.config.preset import with_preset
from outrider.edge_client.config.run_config import run_config
from outrider.edge_client.gate.gate import GateUse
from outrider.edge_client.session.factory import create_edge


def test_big_little_is_the_stop_gate_and_threshold_by_the_papers_two_numbers() -> None:
    given = {
        "preset": "big-little",
        "fallback_threshold": 0.7,
        "rollback_threshold": 2.0,
        "mode": "speculative",
    }
    config = with_preset(run_config(**given))
    settings = gate_settings(config)
    assert settings is not None and settings.use is GateUse.STOP
    assert settings.thresholds.nll == pytest.approx(-math.log(0.7))
    assert config.verification.method is Method.THRESHOLD
    params = make_method_params(config)
    assert params.threshold_pass == pytest.approx(math.exp(-2)) and params.threshold_ratio == 1e6
    check_method(config)
    assert with_preset(config) == config
    assert "approximate" in str(warning(config))
    with create_edge(config).draft or pytest.fail("no draft"):
        assert create_edge(config).labels == ("preset=big-little (approximate)",)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"fallback_threshold": 0.5}, "--fallback-threshold 0.5 goes with --preset big-little"),
        ({"preset": "big-little", "method": "typical"}, "--method typical does not go with --preset"),
        ({"preset": "big-little", "gate": "commit"}, "--gate commit does not go with --preset"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_its_flag(given: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        with_preset(run_config(**given))
