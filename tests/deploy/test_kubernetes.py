"""The rendered overlays: valid, strictly and offline; hardened; in agreement with the program they run."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.fakes import FakeBackend
from support.kustomize import Resource, render

from outrider.cloud_verifier.backends.base import TargetBackend
from outrider.cloud_verifier.config import SCOPE, ServeConfig
from outrider.cloud_verifier.engine.engine import Engine
from outrider.cloud_verifier.rpc.probe_port import LIVE, READY
from outrider.cloud_verifier.server.addresses import check_addresses
from outrider.cloud_verifier.server.metrics import make_registry
from outrider.cloud_verifier.server.model_info import make_model_info
from outrider.cloud_verifier.server.server import LAST_ANSWERS_S
from outrider.common.config.loader import load_config
from outrider.common.config.units import parse_size
from outrider.common.pb import outrider_pb2
from outrider.edge_client.transport.link.balancing import SESSION_HEADER

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
MONITORING = ROOT.parent / "monitoring"
README = ROOT / "README.md"
SCHEMAS = Path(__file__).parent / "schemas"
ALL = ["base", *(f"overlays/{path.name}" for path in sorted((ROOT / "overlays").iterdir()))]
VERSIONS = ("1.31", "")  # "": the newest that the validator knows


@functools.cache
def _rendered(name: str) -> list[Resource]:
    return render(ROOT / name)


def rendered(name: str) -> list[Resource]:
    return copy.deepcopy(_rendered(name))


def find(name: str, kind: str, resource: str = "outrider-verifier") -> Resource:
    (found,) = [
        each
        for each in rendered(name)
        if each["kind"] == kind and (each["metadata"]["name"] == resource or kind == "ConfigMap")
    ]
    return found


def validate(resource: Resource, version: str) -> None:
    """Raises `ValidationError` for a field that is missing, malformed or unknown."""
    group_version = resource["apiVersion"].replace("/", "_")
    schema = SCHEMAS / f"{group_version}_{resource['kind']}.json"
    if schema.exists():
        jsonschema.validate(resource, _strict(json.loads(schema.read_text())))
    else:
        validator = pytest.importorskip(
            "kubernetes_validate", reason="the extra `kubernetes` is not installed"
        )
        validator.validate(resource, version or validator.latest_version(), strict=True)


def _strict(schema: Any) -> Any:
    """Fields that the schema does not name are refused, but in `metadata`, which it leaves to the server."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        result["properties"] = {
            name: value if name == "metadata" else _strict(value)
            for name, value in schema["properties"].items()
        }
        result.setdefault("additionalProperties", False)
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("type", None)
    return result


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_is_valid_strictly_and_offline(name: str, version: str) -> None:
    for resource in rendered(name):
        validate(resource, version)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("StatefulSet", ("spec", "template", "spec")),
        ("HorizontalPodAutoscaler", ("spec",)),
        ("GRPCRoute", ("spec",)),
        ("BackendTrafficPolicy", ("spec", "timeout", "http")),
        ("BackendTLSPolicy", ("spec", "validation")),
    ],
)
def test_a_misspelt_field_is_noticed(kind: str, path: tuple[str, ...]) -> None:
    resource = find("overlays/gateway", kind)
    place = resource
    for key in path:
        place = place[key]
    place["requestTimeouts"] = "0s"
    with pytest.raises(jsonschema.ValidationError):
        validate(resource, VERSIONS[-1])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on this machine")
@pytest.mark.parametrize("name", ALL)
def test_our_renderer_agrees_with_kubectls_kustomize(name: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / name)], capture_output=True, text=True, timeout=60, check=True
    )

    def key(resource: Resource) -> tuple[str, str]:
        return resource["kind"], resource["metadata"]["name"]

    assert sorted(rendered(name), key=key) == sorted(yaml.safe_load_all(done.stdout), key=key)


def config_of(name: str) -> ServeConfig:
    """As the container would load it; files are not read."""
    text = find(name, "ConfigMap")["data"]["verifier.yaml"]
    content = (yaml.safe_load(text), "verifier.yaml")
    return load_config(ServeConfig, scope=SCOPE, content=content, env={}).value


@pytest.mark.parametrize("name", ALL)
def test_the_configuration_loads_and_fits_the_pod(name: str) -> None:
    config = config_of(name)
    check_addresses(config)  # TLS and tokens are there: no --insecure
    assert not config.insecure and config.tls_cert is not None and config.tokens is not None
    pod = find(name, "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    listening = {"grpc": config.listen, "admin": config.admin_listen, "probe": config.probe_listen}
    assert {key: int(value.rpartition(":")[2]) for key, value in listening.items()} == ports
    mounts = {each["mountPath"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    for path in (config.tls_cert, config.tls_key, config.tokens):
        assert path is not None and mounts[str(path.parent)]["readOnly"]
        assert "secret" in volumes[mounts[str(path.parent)]["name"]]
    assert set(volumes) == {each["name"] for each in container["volumeMounts"]}
    assert pod["terminationGracePeriodSeconds"] > config.drain_grace_s + LAST_ANSWERS_S + 10
    memory = parse_size(container["resources"]["limits"]["memory"].upper() + "B", "memory")
    if config.device == "cpu":
        assert parse_size(config.kv_memory, "kv_memory") < memory


@pytest.mark.parametrize("name", ALL)
def test_pods_are_as_the_restricted_standard_wants_them(name: str) -> None:
    pod = find(name, "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert ":" in container["image"] and not container["image"].endswith(":latest")


@pytest.mark.parametrize("name", ALL)
def test_probes_ask_grpc_health_for_what_the_verifier_answers(name: str) -> None:
    (container,) = find(name, "StatefulSet")["spec"]["template"]["spec"]["containers"]
    asked = {kind: container[kind]["grpc"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {each["port"] for each in asked.values()} == {7076}
    assert asked["readinessProbe"].get("service", READY) == READY
    assert asked["startupProbe"]["service"] == asked["livenessProbe"]["service"] == LIVE


def labels_of(name: str) -> dict[str, str]:
    labels: dict[str, str] = find(name, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    return labels


@pytest.mark.parametrize("name", ALL)
def test_whatever_selects_the_pods_finds_them_and_edges_are_others(name: str) -> None:
    pods = labels_of(name).items()
    assert find(name, "StatefulSet")["spec"]["selector"]["matchLabels"].items() <= pods
    assert find(name, "Service")["spec"]["selector"].items() <= pods
    assert find(name, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= pods
    policy = find(name, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods
    assert policy["policyTypes"] == ["Ingress", "Egress"] and "egress" not in policy
    assert policy["ingress"][0]["from"][0]["podSelector"] == {"matchLabels": {"outrider.role": "edge"}}
    service = find(name, "Service")["spec"]
    assert service["clusterIP"] == "None", "headless: ring hash wants the pods' own addresses"
    scaled = find(name, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("StatefulSet", "outrider-verifier")


def metric_names() -> Iterator[str]:
    backend: TargetBackend = FakeBackend()
    engine = Engine(backend, make_model_info(backend, ServeConfig()))
    for family in make_registry(engine, lambda: 0).collect():
        yield family.name


def test_the_autoscalers_metric_is_one_of_the_verifiers() -> None:
    (metric,) = find("base", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in set(metric_names())


SCRAPE = yaml.safe_load((MONITORING / "scrape-kubernetes.yaml").read_text())
_META = "__meta_kubernetes_"


def targets_of(name: str, phase: str = "Running") -> list[dict[str, str]]:
    """The labels of what Prometheus scrapes of a pod: it finds one target for each port of a container."""
    (job,) = SCRAPE["scrape_configs"]
    stateful_set = find(name, "StatefulSet")
    namespace, (container,) = (
        stateful_set["metadata"]["namespace"],
        stateful_set["spec"]["template"]["spec"]["containers"],
    )
    (discovery,) = job["kubernetes_sd_configs"]
    (selector,) = discovery["selectors"]
    key, _, value = selector["label"].partition("=")
    assert namespace in discovery["namespaces"]["names"] and labels_of(name)[key] == value
    found = []
    for port in container["ports"]:
        labels = {
            "__address__": f"10.0.0.1:{port['containerPort']}",
            f"{_META}namespace": namespace,
            f"{_META}pod_name": "outrider-verifier-0",
            f"{_META}pod_phase": phase,
            f"{_META}pod_container_port_name": port["name"],
        }
        if all(relabel(labels, each) for each in job["relabel_configs"]):
            found.append({key: value for key, value in labels.items() if not key.startswith(_META)})
    return found


def relabel(labels: dict[str, str], rule: dict[str, Any]) -> bool:
    """Applies a rule as Prometheus does, and returns whether the target stays."""
    value = ";".join(labels[each] for each in rule["source_labels"])
    is_match = re.fullmatch(rule.get("regex", "(.*)"), value) is not None
    match rule.get("action", "replace"):
        case "keep":
            return is_match
        case "drop":
            return not is_match
        case "replace":
            labels[rule["target_label"]] = value
            return True
        case action:
            raise AssertionError(f"{action} is not known here")


@pytest.mark.parametrize("name", ALL)
def test_prometheus_finds_the_admin_port_of_every_pod_and_nothing_else(name: str) -> None:
    pod = {"namespace": "outrider", "pod": "outrider-verifier-0", "instance": "outrider-verifier-0"}
    port = config_of(name).admin_listen.rpartition(":")[2]
    assert targets_of(name) == [{"__address__": f"10.0.0.1:{port}", **pod}]
    assert targets_of(name, "Succeeded") == []


@pytest.mark.parametrize("name", ALL)
def test_prometheus_shows_a_token_and_checks_the_name_of_the_service(name: str) -> None:
    (job,) = SCRAPE["scrape_configs"]
    service = find(name, "Service")["metadata"]
    assert job["scheme"] == "https" and "insecure_skip_verify" not in job["tls_config"]
    assert job["tls_config"]["server_name"] == f"{service['name']}.{service['namespace']}.svc"
    places = job["tls_config"]["ca_file"], job["authorization"]["credentials_file"]
    assert len({str(Path(each).parent) for each in places}) == 1, "of one secret"
    assert all(Path(each).parent.name in README.read_text() for each in places)
    # What asks without them, as annotations have it done, is refused by the verifier.
    annotations = find(name, "StatefulSet")["spec"]["template"]["metadata"].get("annotations", {})
    assert not [each for each in annotations if each.startswith("prometheus.io/")]
    ports = [each["port"] for each in find(name, "NetworkPolicy")["spec"]["ingress"][1]["ports"]]
    assert ports == [int(config_of(name).admin_listen.rpartition(":")[2])]


def test_the_adapter_finds_the_autoscalers_metric_by_the_labels_of_the_job() -> None:
    (rule,) = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    series, _, selector = rule["seriesQuery"].partition("{")
    (metric,) = find("base", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert series == metric["pods"]["metric"]["name"]
    (target,) = targets_of("base")
    assert set(re.findall(r"(\w+)!=", selector)) == set(rule["resources"]["overrides"]) <= set(target)


def test_the_jobs_name_is_the_one_that_the_rules_use() -> None:
    (job,) = SCRAPE["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}}' in (MONITORING / "rules.yaml").read_text()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool on this machine")
def test_promtool_accepts_the_job(tmp_path: Path) -> None:
    def check(config: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["promtool", "check", "config", "--syntax-only", "prometheus.yml"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    done = check(SCRAPE)
    if "kubernetes_sd_configs not found" in done.stderr:  # Debian's is built without
        (job,) = copy.deepcopy(SCRAPE["scrape_configs"])
        del job["kubernetes_sd_configs"]
        done = check({"scrape_configs": [job]})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["overlays/gateway", "overlays/gpu-gateway"])
def test_the_gateway_routes_every_call_and_cuts_off_no_stream(name: str) -> None:
    route = find(name, "GRPCRoute")["spec"]
    (rule,) = route["rules"]
    services = {each["method"]["service"] for each in rule["matches"]}
    own = outrider_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name
    assert services == {own, "grpc.health.v1.Health"}
    ports = {each["name"]: each["port"] for each in find(name, "Service")["spec"]["ports"]}
    (backend,) = rule["backendRefs"]
    assert backend == {"name": "outrider-verifier", "port": ports["grpc"]}
    gateway = find(name, "Gateway", "outrider")["spec"]["listeners"][0]
    assert route["hostnames"] == [gateway["hostname"]] and route["parentRefs"][0]["name"] == "outrider"
    traffic = find(name, "BackendTrafficPolicy")["spec"]
    assert traffic["targetRefs"][0]["kind"] == "GRPCRoute"
    bounds = traffic["timeout"]["http"]
    assert (bounds["requestTimeout"], bounds["maxStreamDuration"]) == ("0s", "0s")
    # A session's stream is a request for as long as it lasts, and what is left out of the block is 1,024 of all pods.
    kinds = ("maxConnections", "maxParallelRequests", "maxPendingRequests")
    most = find(name, "HorizontalPodAutoscaler")["spec"]["maxReplicas"] * config_of(name).max_sessions
    assert all(traffic["circuitBreaker"][kind] >= most for kind in kinds)
    assert traffic["loadBalancer"]["consistentHash"]["headers"] == [{"name": SESSION_HEADER}]
    tls = find(name, "BackendTLSPolicy")["spec"]
    assert tls["targetRefs"][0]["name"] == "outrider-verifier"
    assert tls["validation"]["hostname"] == "outrider-verifier.outrider.svc"


def test_the_gpu_overlay_asks_for_a_gpu_and_uses_it() -> None:
    (container,) = find("overlays/gpu", "StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert config_of("overlays/gpu").device == "cuda"
    assert config_of("overlays/gpu").kv_memory == "auto", "cards differ"
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(config_of("overlays/gpu").target.parent) in mounts


@pytest.mark.parametrize("name", ALL)
def test_a_claim_that_several_pods_mount_is_named_with_an_access_mode_that_lets_them(name: str) -> None:
    spec = find(name, "StatefulSet")["spec"]
    claims = [
        each["persistentVolumeClaim"]
        for each in spec["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert bool(claims) is name.startswith("overlays/gpu")
    assert find(name, "HorizontalPodAutoscaler")["spec"]["minReplicas"] > 1
    for claim in claims:
        assert claim["readOnly"]
        paragraphs = (ROOT / "README.md").read_text("utf-8").split("\n\n")
        (about,) = (each for each in paragraphs if f"PersistentVolumeClaim `{claim['claimName']}`" in each)
        assert "`accessModes`" in about and "`ReadOnlyMany`" in about and "`ReadWriteMany`" in about
