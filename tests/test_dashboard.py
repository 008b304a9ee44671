"""examples/grafana.json: its names exist, and a real Prometheus (of Debian's package) answers each of its queries from
an hour of serving that is made up here.

python tests/test_dashboard.py    writes the answers to docs/figures/dashboard.json, which docs/pictures.py draws
"""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_specplugins.engine.metrics.names import PREFIX, TABLE, Metric

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
PANELS = [panel for panel in json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]]
ROWS = ["Does it pay?", "What does it cost?", "Does it fail, or draft nothing?", "Store and learning"]
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$instance": ".*"}
BEGIN, SECONDS, EVERY = 1_790_000_000, 3600, 15
STAGES = {"stage": ("0 suffix_lookup", "1 jump")}
SHAPE = {"batch": ("8", "32"), "context": ("4096",), "draft_tokens": ("0", "4", "16")}
VALUES: Mapping[str, tuple[str, ...]] = {  # of labels
    **STAGES,
    **SHAPE,
    **{"position": ("0", "1", "2", "4"), "length": ("0", "2", "4", "8"), "cause": ("raised", "hangs")},
    **{"what": ("sent", "failed"), "weights": ("serving", "loaded"), "part": ("step", "draft_token")},
    **{"reason": ("scheduler", "no draft"), "graph": ("full",)},
}
RATES = {  # a second; of other counters 5
    **{"steps": 240.0, "asked": 120.0, "num_drafts": 60.0, "drafted_tokens": 300.0, "kept_tokens": 240.0},
    **{"num_draft_tokens": 180.0, "num_accepted_tokens": 90.0, "faults": 0.001, "circuit_breaker_openings": 0.0},
}
GAUGES = {"step_cost_seconds": 0.01, "store_bytes": 3e8, "stored_outputs": 9e3, "stored_tokens": 4e6}
THEIRS = (  # of vLLM
    Metric("counter", "generation_tokens", "", labels=()),
    Metric(
        "histogram", "request_time_per_output_token_seconds", "", labels=(), buckets=(0.003, 0.006, 0.01, 0.02, 0.04)
    ),
)


def queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield f"{panel['title']}: {target['legendFormat']}", expression


def series_of(metric: Metric, labels: tuple[str, ...]) -> Iterator[dict[str, str]]:
    """All combinations of values of these labels."""
    if not labels:
        yield {}
        return
    for value in VALUES[labels[0]]:
        for more in series_of(metric, labels[1:]):
            yield {labels[0]: value, **more}


def hour() -> Iterator[str]:
    """An hour's samples as OpenMetrics: load rises and falls, and the acceptance with it."""
    for metric, prefix in [*((metric, PREFIX) for metric in TABLE), *((metric, "vllm:") for metric in THEIRS)]:
        name = prefix + metric.name
        yield f"# TYPE {name} {metric.kind}\n"
        for index, labels in enumerate(series_of(metric, metric.labels)):
            labels |= {"model_name": "m", "engine": "0", "instance": "a:8000", "method": "cascade"}
            text, total = ",".join(f'{key}="{value}"' for key, value in labels.items()), 0.0
            for at in range(0, SECONDS + 1, EVERY):
                load = 1 + 0.5 * math.sin(2 * math.pi * at / SECONDS + 0.2 * index)
                total += RATES.get(metric.name, 5.0) * EVERY * load / (1 + index)
                if metric.kind == "gauge":
                    value = GAUGES.get(metric.name, 1.7 if metric.name == "learned_length" else 0.0) / (1 + 9 * index)
                    yield f"{name}{{{text}}} {value} {BEGIN + at}\n"
                elif metric.kind == "counter":
                    yield f"{name}_total{{{text}}} {total} {BEGIN + at}\n"
                else:
                    bounds = [*map(str, metric.buckets), "+Inf"]
                    for place, bound in enumerate(bounds):
                        yield f'{name}_bucket{{{text},le="{bound}"}} {total * (place + 1) / len(bounds)} {BEGIN + at}\n'
                    yield f"{name}_count{{{text}}} {total} {BEGIN + at}\n"
                    yield f"{name}_sum{{{text}}} {total / 100} {BEGIN + at}\n"
    yield "# EOF\n"


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """The address of a Prometheus that has the hour's samples."""
    (folder / "hour.txt").write_text("".join(hour()))
    (folder / "prometheus.yml").write_text("global: {}\n")
    blocks = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "hour.txt", "data"]
    subprocess.run(blocks, cwd=folder, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={address}"]
    log = (folder / "log.txt").open("w")
    server = subprocess.Popen(["prometheus", *arguments, "--storage.tsdb.retention.time=100y"], cwd=folder, stderr=log)
    try:
        for _ in range(600):
            try:
                opened(f"http://{address}/-/ready")
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://{address}/api/v1/query_range"
    finally:
        server.terminate()
        server.wait(30)
        log.close()


def opened(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return bytes(answer.read())


def answer(api: str, expression: str, step: int = 60) -> list[tuple[dict[str, str], list[float]]]:
    """The series of a query over the hour's second half."""
    times = {"start": BEGIN + SECONDS // 2, "end": BEGIN + SECONDS, "step": step}
    found = json.loads(opened(f"{api}?{urllib.parse.urlencode({'query': expression, **times})}"))["data"]["result"]
    return [(series["metric"], [float(value) for _, value in series["values"]]) for series in found]


def test_dashboard() -> None:
    """Kills: a name that nobody exports, a metric of ours without a panel, a label that its metric does not have, a row
    or one of the three first numbers that is gone, an instance or a model that cannot be chosen."""
    exported = {}
    for metric, prefix in [*((metric, PREFIX) for metric in TABLE), *((metric, "vllm:") for metric in THEIRS)]:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("_total" * (metric.kind == "counter"),)
        exported |= {prefix + metric.name + end: metric for end in ends}
    asked = {name for _, expression in queries() for name in re.findall(r"vllm:\w+", expression)}
    assert asked <= exported.keys()
    assert {exported[name].name for name in asked} == {metric.name for metric in (*TABLE, *THEIRS)}
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == ROWS
    assert [panel["type"] for panel in PANELS[:5]] == ["row", "stat", "stat", "stat", "timeseries"]
    for panel in PANELS:
        assert panel["title"] and (panel["type"] == "row" or (panel["description"] and panel["targets"]))
    for _, expression in queries():
        by = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
        own = [{*exported[name].labels, "le", "instance"} for name in re.findall(r"vllm:\w+", expression)]
        assert all(by <= labels for labels in own), expression
        assert expression.count('{model_name=~".*", instance=~".*"}') == expression.count("vllm:")


def test_names_of_vllm() -> None:
    """Kills: a metric of vLLM's that vLLM does not have."""
    from test_alerts import sources

    pytest.importorskip("vllm")
    assert all(f'"vllm:{metric.name}"' in sources() for metric in THEIRS)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus (Debian: apt install prometheus)")
def test_each_query_is_answered(tmp_path: Path) -> None:
    """Kills: a query that Prometheus refuses, or answers without data or with NaN, while requests are served."""
    with prometheus(tmp_path) as api:
        for name, expression in queries():
            found = answer(api, expression)
            assert found and not any(map(math.isnan, found[0][1])), f"{name}: {expression}"


def main() -> None:
    """Writes the answers of each panel."""
    import tempfile

    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, prometheus(Path(folder)) as api:
        for panel in PANELS:
            series = []
            for target in panel.get("targets", ()):
                expression = next(
                    text for name, text in queries() if name == f"{panel['title']}: {target['legendFormat']}"
                )
                for labels, values in answer(api, expression, 120):
                    legend = re.sub(
                        r"\{\{(\w+)\}\}", lambda match, its=labels: its.get(match[1], ""), target["legendFormat"]
                    )
                    series.append({"legend": legend, "values": [float(f"{value:.4g}") for value in values]})
            rows.append({"title": panel["title"], "type": panel["type"], "place": panel["gridPos"], "series": series})
    made = subprocess.run(["prometheus", "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    facts = {
        "command": "python tests/test_dashboard.py",
        "commit": commit.stdout.strip(),
        "versions": {"prometheus": made},
        "clock": "none: an hour that is made up",
        "interval": "none: one series each",
        "panels": rows,
    }
    (ROOT / "docs" / "figures" / "dashboard.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
