"""Alerts, recordings and the board: every name is one that a verifier exposes, every alert is explained."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Counter, generate_latest
from support.dev_security import make_dev_security
from support.fakes import FakeBackend

from outrider.cloud_verifier.config import ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.engine.observe import TIMES_NS
from outrider.cloud_verifier.security.server_security import ServerSecurity
from outrider.cloud_verifier.server.metrics import make_registry
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.common.types import FinishReason, Origin, RoundErrorCode
from outrider.edge_client.core.stats import RoundOutcome
from outrider.edge_client.daemon.metrics import DaemonMetrics, DaemonState

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
PAGE = ROOT / "docs" / "observability.md"
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
BOARDS = [
    json.loads((MONITORING / name).read_text()) for name in ("grafana-board.json", "grafana-edge-board.json")
]
_SERIES = re.compile(r"\b((?:outrider_verifier|outrider_edge|process)_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")
_VALUE = re.compile(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"$]*)"')
_VALUES_OF = {"outcome": RoundOutcome, "origin": Origin, "finish": FinishReason, "code": RoundErrorCode}
_OF_THE_SCRAPE = {"instance", "job", "namespace", "pod"}


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in (panel for board in BOARDS for panel in board["panels"]):
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    adapter = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text())
    yield "prometheus-adapter", adapter["rules"]["custom"][0]["seriesQuery"]


@pytest.fixture(scope="module")
def of_a_verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real scrape of a verifier."""
    settings = make_dev_security(tmp_path_factory.mktemp("certs")).serve_settings
    config = ServeConfig(**{key: Path(value) for key, value in settings.items()})  # type: ignore[arg-type]
    backend = FakeBackend()
    engine = Engine(backend, make_model_info(backend, config))
    return generate_latest(make_registry(engine, lambda: 0, ServerSecurity(config))).decode()


@pytest.fixture(scope="module")
def exposed(of_a_verifier: str) -> dict[str, set[str]]:
    """Names of the series of real scrapes of a verifier and of a daemon, with the labels each has."""
    daemon = DaemonMetrics(lambda: DaemonState("outrider", 0, 0, 1, 0, 0, True))
    for counter in vars(daemon).values():
        if isinstance(counter, Counter) and counter._labelnames:
            counter.labels(*counter._labelnames).inc()
    text = of_a_verifier + daemon.text().decode()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            match = re.match(r"(\w+)(?:\{(.*)\})?", line)
            assert match is not None
            found.setdefault(match[1], set()).update(_LABEL.findall(match[2] or ""))
    # Kinds of errors appear when the first one happens.
    for line in text.splitlines():
        if line.startswith("# TYPE") and line.endswith(" counter"):
            found.setdefault(line.split()[2], set())
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_series_named_is_one_that_is_exposed(
    where: str, expression: str, exposed: dict[str, set[str]]
) -> None:
    named = _SERIES.findall(expression)
    assert named or any(record in expression for record in RECORDED) or "up{" in expression
    for name, selector in named:
        assert name in exposed, f"{where}: there is no {name}"
        if exposed[name]:
            unknown = set(_LABEL.findall(selector)) - exposed[name] - _OF_THE_SCRAPE
            assert not unknown, f"{where}: {name} has no label {unknown}"


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_value_named_is_one_that_its_label_takes(where: str, expression: str) -> None:
    for _, selector in _SERIES.findall(expression):
        for label, values in _VALUE.findall(selector):
            known = {str(each) for each in _VALUES_OF.get(label, ())}
            assert not known or set(values.split("|")) <= known, f"{where}: {label} is never {values}"


def test_every_metric_of_a_verifier_is_in_the_documentation_and_no_other(of_a_verifier: str) -> None:
    section = PAGE.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    table = section.partition("| name |")[2].partition("\n\n")[0]
    documented = {
        name
        for column in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", column)
    }
    exposed = set(re.findall(r"^# TYPE outrider_verifier_(\w+)", of_a_verifier, re.MULTILINE))
    assert documented - {"gpu_memory_peak_bytes"} == exposed


def test_where_no_verifier_is_watched_none_is_missed() -> None:
    (rule,) = [each for each in ALERTS if each["alert"] == "OutriderNoneServing"]
    assert re.search(r'and on \(\) count\(.*up{job="outrider"}', rule["expr"]), (
        "it fires wherever edges alone are"
    )


def test_the_threshold_of_slow_rounds_is_a_bound_of_their_buckets() -> None:
    (rule,) = [each for each in ALERTS if each["alert"] == "OutriderRoundsSlow"]
    threshold_s = float(rule["expr"].rpartition("> ")[2])
    assert round(threshold_s * 1e9) in TIMES_NS, "between two bounds a quantile is a guess"


@pytest.mark.parametrize("metric", ["refusals_total", "refused_calls_total", "ended_calls_total"])
def test_every_reason_is_in_the_documentation(metric: str, of_a_verifier: str) -> None:
    reasons = re.findall(rf'^outrider_verifier_{metric}{{reason="(\w+)"}}', of_a_verifier, re.MULTILINE)
    section = PAGE.read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert reasons and set(reasons) <= set(re.findall(r"`(\w+)`", section))


def test_recorded_names_are_recorded() -> None:
    used = {
        name
        for _, expression in expressions()
        for name in re.findall(r"outrider(?:_edge)?:\w+:\w+", expression)
    }
    assert used <= RECORDED


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_says_how_bad_it_is_and_where_it_is_explained(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert anchor == alert["alert"].lower()
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
    assert alert["alert"] in headings


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_a_board_is_whole(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in board["panels"]]
    assert len(places) == len(set(places)), "two panels lie on one another"
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on this machine")
def test_promtool_accepts_the_rules_and_they_fire_as_they_should() -> None:
    for command in (("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")):
        done = subprocess.run(
            ["promtool", *command], cwd=MONITORING, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
