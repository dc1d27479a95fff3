"""The Grafana board, the Prometheus configuration and the alerts name metrics that exist."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from quire.serve.metrics.definitions import METRICS
from release.check_board import BOARD, DEPLOY, metric_names, queries

PROMETHEUS = DEPLOY / "prometheus"
NAMES = {f"quire_{m.name}" + ("_total" if m.kind == "counter" else "") for m in METRICS}


def test_every_query_of_the_board_names_metrics_that_exist():
    expressions = queries()

    assert len(expressions) > 30
    for name, expression in expressions.items():
        assert metric_names(expression), name
        assert metric_names(expression) <= NAMES, name
        assert "$" not in expression, name


def test_every_alert_names_metrics_that_exist():
    [group] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]

    assert len(group["rules"]) >= 5
    for rule in group["rules"]:
        assert metric_names(rule["expr"]) <= NAMES, rule["alert"]
        assert rule["annotations"]["summary"]


def test_a_panel_has_its_own_place():
    places = [
        (panel["gridPos"]["x"], panel["gridPos"]["y"])
        for panel in json.loads(BOARD.read_text())["panels"]
    ]

    assert len(set(places)) == len(places)


def test_compose_mounts_folders_that_exist():
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
