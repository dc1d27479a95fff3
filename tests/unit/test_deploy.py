import importlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.cli.options import KV, MODEL, SCHEDULE, SERVER
from quire.scale.serve.builder import recipe_of
from quire.serve.config import KEY_VARIABLE, METRICS_KEY_VARIABLE
from quire.serve.metrics.definitions import METRICS
from quire.serve.metrics.endpoint import PATH as METRICS_PATH
from release.check_board import BOARD, DEPLOY, metric_names, queries

PROMETHEUS = DEPLOY / "prometheus"
PROBES = ("startup", "liveness", "readiness")
NAMES = {f"quire_{m.name}" + ("_total" if m.kind == "counter" else "") for m in METRICS}


def test_queries_and_alerts_name_metrics_that_exist():
    expressions = queries()
    assert len(expressions) > 30
    for name, expression in expressions.items():
        assert metric_names(expression), name
        assert metric_names(expression) <= NAMES, name
        assert "$" not in expression, name
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert metric_names(rule["expr"]) <= NAMES, rule["alert"]
        assert rule["annotations"]["summary"]


def test_panels_have_own_places_and_compose_folders_exist():
    places = [panel["gridPos"] for panel in json.loads(BOARD.read_text())["panels"]]
    assert len({(place["x"], place["y"]) for place in places}) == len(places)

    services = yaml.safe_load((DEPLOY.parent / "compose.yaml").read_text())["services"]
    assert {"quire", "prometheus", "grafana"} <= services.keys()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY.parent / source).is_dir(), source


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_configuration_and_alerts():
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        command = ["promtool", "check", kind, str(Path(PROMETHEUS / name))]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout + checked.stderr


# ---- Kubernetes ----------------------------------------------------------------------------------


def manifests(name):
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def pod_of_deployment():
    [deployment] = [found for found in manifests("quire.yaml") if found["kind"] == "Deployment"]
    return deployment["spec"]["template"]


def pods_of_ray():
    [service] = manifests("rayservice.yaml")
    cluster = service["spec"]["rayClusterConfig"]
    return [group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]


def test_the_manifests_are_valid():
    validate = pytest.importorskip("kubernetes_validate").validate
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}} | {"spec": pod["spec"]}
        for pod in pods_of_ray()
    ]

    for manifest in (*manifests("quire.yaml"), *pods):
        validate(manifest, "1.33", strict=True)


def test_pods_live_longer_than_the_shutdown_of_the_server_that_probes_reach():
    pod = pod_of_deployment()
    [container] = pod["spec"]["containers"]
    command, model, *flags = container["args"]
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    known = {found.flag for section in (MODEL, KV, SCHEDULE, SERVER) for found in section.options()}
    paths = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in PROBES}
    annotations = pod["metadata"]["annotations"]

    assert (command, model) == ("serve", "quire-tiny")
    assert given.keys() <= known
    assert paths == {"/health", "/ready"}
    assert given["port"] == annotations["prometheus.io/port"]
    assert int(given["port"]) == container["ports"][0]["containerPort"]
    assert annotations["prometheus.io/path"] == METRICS_PATH

    arguments = manifests("rayservice.yaml")[0]["spec"]["serveConfigV2"]
    [application] = yaml.safe_load(arguments)["applications"]
    [container] = pod_of_deployment()["spec"]["containers"]
    timeouts = [float(application["args"]["shutdown-timeout"])]
    timeouts += [float(a.split("=")[1]) for a in container["args"] if "shutdown-timeout" in a]
    for pod in (pod_of_deployment(), *pods_of_ray()):
        assert pod["spec"]["terminationGracePeriodSeconds"] > max(timeouts)


def test_ray_is_built_from_arguments_and_keys_come_from_a_secret():
    service = manifests("rayservice.yaml")[0]["spec"]
    config = yaml.safe_load(service["serveConfigV2"])
    [application] = config["applications"]
    module, _, name = application["import_path"].partition(":")
    recipe = recipe_of(application["args"])
    [workers] = service["rayClusterConfig"]["workerGroupSpecs"]
    worker = workers["template"]["spec"]["containers"][0]

    assert callable(getattr(importlib.import_module(module), name))
    assert config["http_options"]["port"] == worker["ports"][0]["containerPort"]
    assert workers["maxReplicas"] == recipe.ray.max_replicas
    assert recipe.ray.cpus == float(worker["resources"]["requests"]["cpu"])

    containers = [pod["spec"]["containers"][0] for pod in (pod_of_deployment(), *pods_of_ray())]
    for container in containers:
        sources = {found["name"]: found["valueFrom"] for found in container["env"]}
        assert sources.keys() == {KEY_VARIABLE, METRICS_KEY_VARIABLE}
        assert all("secretKeyRef" in source for source in sources.values())
