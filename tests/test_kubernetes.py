"""The example manifests agree with the code and with each other: flags, ports, probes, metrics, KV events, names."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from paceline.config import EngineConfig, SchedulerConfig, ServerConfig, public_options
from paceline.server import engine_metrics, supervisor
from paceline.server.metrics import VLLM_NAMES
from paceline.server.routes import ROUTES
from paceline.server.routing import Access
from tests.test_deployment import image_environment

FOLDER = Path(__file__).parent.parent / "deploy" / "kubernetes"
SCALING = (FOLDER.parent.parent / "docs" / "scaling.md").read_text()
MANIFESTS = [manifest for path in sorted(FOLDER.glob("*.yaml")) for manifest in yaml.safe_load_all(path.read_text())]


def manifest(kind: str, name: str) -> Any:
    (found,) = [one for one in MANIFESTS if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container(deployment: str, name: str) -> Any:
    spec = manifest("Deployment", deployment)["spec"]["template"]["spec"]
    (found,) = [one for one in spec["containers"] if one["name"] == name]
    return found


def arguments() -> dict[str, str]:
    """Of `paceline serve`: option names with their values."""
    pairs = [argument.removeprefix("--").split("=", 1) for argument in container("paceline", "paceline")["args"]]
    return {name.replace("-", "_"): value for name, value in pairs}


def ports() -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container("paceline", "paceline")["ports"]}


def picker() -> tuple[Any, dict[str, Any]]:
    """The configuration of the endpoint picker, and the parameters of its plugins by type."""
    config = yaml.safe_load(manifest("ConfigMap", "paceline-epp")["data"]["config.yaml"])
    return config, {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}


def test_the_server_accepts_the_flags() -> None:
    given = arguments()
    assert given.pop("model") == given["served_name"]
    kinds = {item.name: kind for kind in (ServerConfig, EngineConfig, SchedulerConfig) for item in public_options(kind)}
    assert set(given) <= set(kinds)
    values: dict[type, dict[str, Any]] = {}
    for name, text in given.items():
        (field,) = [item for item in dataclasses.fields(kinds[name]) if item.name == name]
        value = type(field.default)(text) if isinstance(field.default, int | float) else text
        values.setdefault(kinds[name], {})[name] = value
    for kind, options in values.items():
        kind(**options)


def test_ports_are_those_of_the_server() -> None:
    given, found = arguments(), ports()
    environment = image_environment()
    assert environment["PACELINE_HOST"] == "0.0.0.0"
    assert found["http"] == int(environment["PACELINE_PORT"])
    assert given["kv_events"].endswith(f":{found['kv-events']}")
    assert given["kv_events_replay"].endswith(f":{found['kv-replay']}")
    assert given["kv_events_topic"] == f"kv@$(POD_IP):{found['http']}@{given['served_name']}"
    assert [port["targetPort"] for port in manifest("Service", "paceline")["spec"]["ports"]] == ["http"]


def test_probes_are_public_routes_and_termination_leaves_time_to_drain() -> None:
    public = {route.path for route in ROUTES if route.access is Access.PUBLIC}
    server = container("paceline", "paceline")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = server[probe]["httpGet"]
        assert request["path"] in public and request["port"] == "http"
    assert server["livenessProbe"]["httpGet"]["path"] == "/health", "it is alive while it loads or drains"
    grace = manifest("Deployment", "paceline")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > float(arguments()["shutdown_s"]) + 2 * supervisor._EXIT_MARGIN_S


def test_the_pool_selects_the_servers_and_names_the_picker() -> None:
    pool, route = manifest("InferencePool", "paceline")["spec"], manifest("HTTPRoute", "paceline")["spec"]
    labels = manifest("Deployment", "paceline")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"] == labels == manifest("Service", "paceline")["spec"]["selector"]
    assert [port["number"] for port in pool["targetPorts"]] == [ports()["http"]]
    service = manifest("Service", pool["endpointPickerRef"]["name"])["spec"]
    assert service["ports"][0]["port"] == pool["endpointPickerRef"]["port"]["number"]
    grpc = {port["name"]: port["containerPort"] for port in container("paceline-epp", "epp")["ports"]}
    assert grpc[service["ports"][0]["targetPort"]] == service["ports"][0]["port"]
    (backend,) = route["rules"][0]["backendRefs"]
    assert manifest(backend["kind"], backend["name"])["apiVersion"] == f"{backend['group']}/v1"
    manifest("Gateway", route["parentRefs"][0]["name"])


def test_the_gateway_reaches_the_picker_by_tls() -> None:
    """The picker serves TLS unless it is told not to, with a certificate that nobody can verify."""
    given = container("paceline-epp", "epp")["args"]
    assert not [argument for argument in given if "secure-serving" in argument or "cert-path" in argument]
    rule = manifest("DestinationRule", "paceline-epp")["spec"]
    assert rule["host"] == manifest("InferencePool", "paceline")["spec"]["endpointPickerRef"]["name"]
    assert rule["trafficPolicy"]["tls"] == {"mode": "SIMPLE", "insecureSkipVerify": True}
    assert manifest("Gateway", "inference-gateway")["spec"]["gatewayClassName"] == "istio"


def test_what_happens_without_the_picker_is_chosen_and_explained() -> None:
    assert manifest("InferencePool", "paceline")["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    for text in ((FOLDER / "inference-pool.yaml").read_text(), SCALING):
        assert "FailOpen" in text and "FailClose" in text


def test_autoscaling_follows_the_queue_time_of_servers() -> None:
    scaler = manifest("HorizontalPodAutoscaler", "paceline")["spec"]
    target = scaler["scaleTargetRef"]
    deployment = manifest(target["kind"], target["name"])
    assert "replicas" not in deployment["spec"], "applied again, it would undo the scaling"
    (metric,) = scaler["metrics"]
    (rule,) = yaml.safe_load(manifest("ConfigMap", "paceline-prometheus-adapter")["data"]["config.yaml"])["rules"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    measured = set(re.findall(r"paceline_(\w+)_(?:sum|count)", rule["seriesQuery"] + rule["metricsQuery"]))
    assert measured == {"request_queue_time_seconds"}
    assert '"request_queue_time_seconds"' in Path(engine_metrics.__file__).read_text()
    assert arguments()["metric_names"] in ("paceline", "both")


def test_disruptions_take_one_server_at_a_time() -> None:
    budget = manifest("PodDisruptionBudget", "paceline")["spec"]
    assert budget["selector"] == manifest("Deployment", "paceline")["spec"]["selector"]
    assert budget["maxUnavailable"] < manifest("HorizontalPodAutoscaler", "paceline")["spec"]["minReplicas"]


def test_every_container_requests_what_it_needs() -> None:
    for name in ("paceline", "paceline-epp"):
        for one in manifest("Deployment", name)["spec"]["template"]["spec"]["containers"]:
            resources = one["resources"]
            assert set(resources["requests"]) == {"cpu", "memory"} and "memory" in resources["limits"]
            assert "cpu" not in resources["limits"], "it would delay the scheduler between two forward passes"
    assert container("paceline", "paceline")["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_models_are_kept_in_a_volume_of_all_servers() -> None:
    volumes = manifest("Deployment", "paceline")["spec"]["template"]["spec"]["volumes"]
    (claim,) = [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]
    assert manifest("PersistentVolumeClaim", claim)["spec"]["accessModes"] == ["ReadWriteMany"]
    mounts = {one["name"]: one["mountPath"] for one in container("paceline", "paceline")["volumeMounts"]}
    assert mounts["models"] == image_environment()["PACELINE_HOME"]


def test_the_token_of_the_hub_is_an_optional_secret_that_the_docs_create() -> None:
    for deployment, name in (("paceline", "paceline"), ("paceline-epp", "renderer")):
        (token,) = [one for one in container(deployment, name)["env"] if one["name"] == "HF_TOKEN"]
        secret = token["valueFrom"]["secretKeyRef"]
        assert secret["optional"] is True
        assert f"kubectl create secret generic {secret['name']} --from-literal={secret['key']}=" in SCALING


def test_only_the_picker_reads_kv_events() -> None:
    everyone, events = manifest("NetworkPolicy", "paceline")["spec"]["ingress"]
    assert [port["port"] for port in everyone["ports"]] == ["http"]
    assert {port["port"] for port in events["ports"]} == set(ports()) - {"http"}
    labels = manifest("Deployment", "paceline-epp")["spec"]["template"]["metadata"]["labels"]
    assert events["from"] == [{"podSelector": {"matchLabels": labels}}]


def test_the_picker_reads_the_kv_events_that_are_published() -> None:
    _, plugins = picker()
    producer, given = plugins["precise-prefix-cache-producer"], arguments()
    events = producer["kvEventsConfig"]
    assert events["podDiscoveryConfig"] == {
        "socketPort": ports()["kv-events"],
        "replaySocketPort": ports()["kv-replay"],
    }
    assert given["kv_events_topic"].startswith(events["topicFilter"])
    assert producer["tokenProcessorConfig"]["blockSizeTokens"] == int(given["page_size"])
    assert plugins["token-producer"]["modelName"] == given["served_name"]
    renderer = container("paceline-epp", "renderer")
    assert renderer["args"][0] == given["served_name"]
    assert plugins["token-producer"]["vllm"]["url"].endswith(f":{renderer['ports'][0]['containerPort']}")


def test_the_picker_reads_metrics_that_exist() -> None:
    _, plugins = picker()
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    names = {value for name, value in engine.items() if name.endswith("Spec") and value}
    assert names == set(VLLM_NAMES.values())
    assert arguments()["metric_names"] in ("vllm", "both")


def test_every_reference_to_a_plugin_has_one() -> None:
    config, plugins = picker()
    used = [plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    for source in config["dataLayer"]["sources"]:
        used += [source["pluginRef"], *(extractor["pluginRef"] for extractor in source["extractors"])]
    used.append(plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"])
    assert set(used) <= set(plugins)
