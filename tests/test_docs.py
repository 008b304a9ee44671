"""The documentation against the code: pages that are generated, links, the size of the README."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specplugins.engine.metrics.names import TABLE

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def test_configuration_page_is_current(tmp_path: Path) -> None:
    """Kills: a field that was added or changed without `python docs/configuration.py`."""
    script = tmp_path / "configuration.py"
    script.write_text((ROOT / "docs" / "configuration.py").read_text())
    subprocess.run([sys.executable, str(script)], check=True)
    written = script.with_suffix(".md").read_text()
    assert (ROOT / "docs" / "configuration.md").read_text() == written, "run python docs/configuration.py"


def test_table_of_plans_is_current() -> None:
    """Kills: a plan that differs from docs/compatibility.md."""
    plans = runpy.run_path(str(ROOT / "docs" / "plans.py"))
    assert plans["PAGE"].read_text() == plans["page"](), "run python docs/plans.py"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "DESIGN.md", *PAGES], ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Kills: a link to a file or a heading that is not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_readme_is_short() -> None:
    """Kills: a README that grows into a manual, and one that is wider than a screen."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 110


def test_tables_are_current() -> None:
    """Fails if a table of docs/figures.md or README's is not that of the data, or data lack their command, commit,
    versions, clock or interval."""
    made = subprocess.run([sys.executable, "docs/tables.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "figures.md").read_text() + (ROOT / "README.md").read_text()
    for table in made.stdout.strip().split("\n\n"):
        assert table.strip() in page, f"run python docs/tables.py: {table[:80]}"
    facts = {path.name: json.loads(path.read_text()) for path in (ROOT / "docs" / "figures").glob("*.json")}
    for name, data in {**facts, "field_table.json": facts["field_table.json"]["public"]}.items():
        assert {"command", "commit", "versions", "clock", "interval"} <= set(data), name


def test_metrics_are_documented() -> None:
    """Kills: a metric that was added, renamed or dropped without the operating guide."""
    guide = (ROOT / "docs" / "operating.md").read_text()
    lists = re.findall(r"^\* (counter|gauge|histogram)s: ((?:[^*]|\n)*?)\n(?=\*|\n)", guide, re.MULTILINE)
    listed = [(name, kind) for kind, names in lists for name in re.findall(r"`(\w+)`", names)]
    exported = [(metric.name + "_total" * (metric.kind == "counter"), metric.kind) for metric in TABLE]
    assert sorted(listed) == sorted(exported)
