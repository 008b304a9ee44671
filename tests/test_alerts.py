"""examples/alerts.yaml: its names exist, and its alerts fire as they should (`promtool` of Debian's `prometheus`)."""

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_specplugins.engine.metrics.names import LABELS, PREFIX, TABLE

ROOT = Path(__file__).parents[1]
RULES = ROOT / "examples" / "alerts.yaml"
UNITS = ROOT / "tests" / "alerts.yaml"
OTHERS = {"instance", "le", "finished_reason", "handler", "status"}  # of Prometheus, vLLM and its front end


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def sources() -> str:
    """Returns the code that defines metrics of other packages."""
    files = [("vllm", "v1/metrics/loggers.py"), ("prometheus_fastapi_instrumentator", "metrics.py")]
    folders = {name: Path(find_spec(name).submodule_search_locations[0]) for name, _ in files}
    return "".join((folders[name] / file).read_text() for name, file in files)


def test_names_and_labels() -> None:
    """Fails if an alert reads a metric that does not exist, or a label that the metric lacks."""
    pytest.importorskip("vllm")
    exported = {PREFIX + metric.name + "_total" * (metric.kind == "counter"): set(metric.labels) for metric in TABLE}
    theirs = sources()
    for rule in rules():
        names = set(re.findall(r"vllm:\w+|\bhttp_\w+", rule["expr"]))
        assert names, rule["alert"]
        for name in names - exported.keys():
            plain = name.removesuffix("_total")
            assert f'"{plain}"' in theirs or f'"{name}"' in theirs, name
        labels = re.findall(r"(\w+)=~?\"|(\w+)!~?=?\"|\$labels\.(\w+)", f"{rule['expr']} {rule['annotations']}")
        known = set(LABELS) | OTHERS | set().union(*(exported[name] for name in names & exported.keys()))
        assert {label for found in labels for label in found if label} <= known, rule["alert"]


def test_each_alert_is_whole_and_tested() -> None:
    """Fails if an alert lacks its severity or what to do, or if no unit test lets it fire and keeps it silent."""
    units = yaml.safe_load(UNITS.read_text())["tests"]
    checks = [check for unit in units for check in unit["alert_rule_test"]]
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"].keys() == {
            "summary",
            "action",
        }
        outcomes = {bool(check.get("exp_alerts")) for check in checks if check["alertname"] == rule["alert"]}
        assert outcomes == {True, False}, rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not there (Debian: apt install prometheus)")
def test_alerts_fire(tmp_path: Path) -> None:
    """Fails if an alert does not fire on its fault, or fires on a server that is healthy or idle: with
    `max(circuit_breaker_open)`, with a rate over less than two scrapes, or without `unless`."""
    (tmp_path / "rules.yaml").write_text(
        yaml.safe_dump({"groups": yaml.safe_load(RULES.read_text())["spec"]["groups"]})
    )
    (tmp_path / "units.yaml").write_text(yaml.safe_dump(yaml.safe_load(UNITS.read_text())))
    done = subprocess.run(["promtool", "test", "rules", "units.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
