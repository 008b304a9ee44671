"""The documentation against the code: generated pages and tables, links, sizes, words, pictures and the site."""

import ast
import asyncio
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specplugins.methods import METHODS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WRITTEN_BY_HAND = [
    path
    for path in PAGES
    if path.parent.name not in ("research", "upstream")
    and not re.search(r"^<!-- Written by (?!.* from )", path.read_text()[:300], re.M)
]
BLOCK = re.compile(r"<!-- Written by .*?<!-- End of the \w+\. -->", re.DOTALL)
TEMPLATE = [
    "What it drafts",
    "When it wins and when it loses",
    "Start it",
    "Costs",
    "Runners and schedule",
    "Limits",
    "Metrics",
    "Measured",
]
# Words and patterns that a first reader had to read twice.
WORDS = {
    "a pronoun for a noun": r"\b(own|found|kept|told|said|whose|nobody)\b|(?<!at )\bmost\b",
    "'but for'": r"\bbut for\b",
    "'no more' for 'no longer'": r"\bno more\b(?! (than|forced|drafts|tokens))",
    "'of it' after a number": r"\b\d+(\.\d+)? of it\b",
    "'so it does'": r"\bso (it|they) do(es)?\b",
    "a verb at the end of a clause": r", which vLLM \w+s\b[.,;]",
    "a list of more than three numbers": r"\d[\w.]* / \d[\w.]* / \d[\w.]* / \d",
    "another word for vLLM's": r"\b(tokens a step|decoding speed|switched off permanently|played at)\b",
}


def prose(text: str) -> str:
    """A page without code, tables and generated blocks."""
    text = re.sub(r"```.*?```", "", BLOCK.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "`code`", text)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("|"))


def script(name: str) -> dict[str, object]:
    return runpy.run_path(str(DOCS / name))


def test_configuration_page_is_current() -> None:
    """Kills: a field that was added or changed without `python docs/configuration.py`."""
    assert (DOCS / "configuration.md").read_text() == script("configuration.py")["page"](), (
        "run python docs/configuration.py"
    )


def test_reference_pages_are_current() -> None:
    """Kills: a command, a metric, a type of draft.py or a cell of the support matrix that its page does not have."""
    reference = script("reference.py")
    for name in reference["PAGES"]:
        assert (DOCS / name).read_text() == reference["page"](name), "run python docs/reference.py"


def test_recipes_are_current() -> None:
    """Kills: a recipe whose page has another command, plan or size."""
    assert (DOCS / "choose-a-method.md").read_text() == script("recipes.py")["page"](), "run python docs/recipes.py"


def test_page_of_logs_is_current() -> None:
    """Kills: a warning or an error in the code that docs/logs.md lacks, or that has no action; an action of no line."""
    logs = script("logs.py")
    assert (DOCS / "logs.md").read_text() == logs["page"](), "run python docs/logs.py"
    assert sorted({logs["action"](line) for _, line in logs["lines"]()}) == sorted(logs["ACTIONS"])


def test_lines_of_vllm() -> None:
    """Kills: a line of vLLM that docs/logs.md explains, but that vLLM no longer has."""
    vllm = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    words = {
        "config/vllm.py": [
            "max_num_scheduled_tokens is set to",
            "Model Runner V2 requires",
            "Async scheduling not supported with",
        ],
        "config/compilation.py": [" is not supported", "with spec-decode for attention backend "],
        "config/scheduler.py": ["Using custom scheduler class "],
        "platforms/interface.py": ["Unknown vLLM environment variable detected: "],
        "v1/worker/cpu_worker.py": ["Speculative decoding on CPU without Intel OpenMP"],
        "v1/spec_decode/metrics.py": ["SpecDecoding metrics: "],
    }
    for name, phrases in words.items():
        for phrase in phrases:
            assert phrase in (vllm / name).read_text() and phrase in (DOCS / "logs.md").read_text(), phrase


def test_tables_of_plans_are_current() -> None:
    """Kills: a plan that differs from docs/compatibility.md or from a method's page."""
    plans = script("plans.py")
    assert len(plans["pages"]()) > len(METHODS)
    for page in plans["pages"]():
        assert page.read_text() == plans["page"](page.read_text()), "run python docs/plans.py"


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
    assert len(lines) <= 100 and max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_pages_are_short() -> None:
    """Kills: a page of more than 150 lines by hand, and a method's page of more than 45 (90 with the store)."""
    for page in WRITTEN_BY_HAND:
        lines = BLOCK.sub("", page.read_text()).count("\n")
        method = 45 + 45 * (page.stem == "suffix_lookup")
        assert lines <= (method if page.parent.name == "methods" else 150), page


def test_pages_are_few() -> None:
    """Kills: a page more, where a section of a page would do (texts for vLLM's issues do not count)."""
    assert len([page for page in [*ROOT.glob("*.md"), *PAGES] if page.parent.name != "upstream"]) <= 33


def test_all_pages_are_short() -> None:
    """Kills: more than 107 kB to read; generated pages, research notes and texts for vLLM's issues do not count."""
    pages = [*ROOT.glob("*.md"), *WRITTEN_BY_HAND]
    assert sum(len(BLOCK.sub("", page.read_text())) for page in pages) <= 107_000


@pytest.mark.parametrize("method", METHODS)
def test_methods_have_pages(method: str) -> None:
    """Kills: a method without a page, or a page without the template's sections."""
    page = DOCS / "methods" / f"{method}.md"
    assert page.exists(), "copy docs/methods/custom.md, and name the page in mkdocs.yml"
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == TEMPLATE
    assert f"methods/{method}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *WRITTEN_BY_HAND], ids=lambda page: page.name)
def test_words(page: Path) -> None:
    """Kills: a word or a pattern of WORDS in a page."""
    check_words(page.name, prose(page.read_text()))


def check_words(name: str, text: str) -> None:
    for reason, pattern in WORDS.items():
        match = re.search(pattern, text, re.IGNORECASE)
        assert match is None, f"{name}: {reason}: {text[max(0, match.start() - 40) : match.end() + 40]!r}"


def test_words_of_generated_pages() -> None:
    """Kills: such a word in a help text, a field's description, a recipe, a log line, or the docstrings of draft.py."""
    for name, made in script("reference.py")["PAGES"].items():
        check_words(name, prose("\n".join(made())))
    check_words("recipes.json", (ROOT / "examples" / "recipes.json").read_text())
    for name in ("configuration.md", "logs.md"):
        test_words(DOCS / name)


def test_words_of_errors() -> None:
    """Kills: such a word in the sentence of an exception."""
    for path in (ROOT / "vllm_specplugins").rglob("*.py"):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        for argument in (argument for each in raised if isinstance(each, ast.Call) for argument in each.args):
            texts = [node.value for node in ast.walk(argument) if isinstance(node, ast.Constant)]
            sentence = " ".join(text for text in texts if isinstance(text, str))
            for reason, pattern in WORDS.items():
                assert not re.search(pattern, sentence, re.IGNORECASE), f"{path.name}: {reason}: {sentence}"


def test_tables_are_current() -> None:
    """Fails if a table of research/figures.md, performance.md or tuning.md is not that of the data, or data lack their
    command, commit, versions, clock or interval."""
    made = subprocess.run([sys.executable, "docs/tables.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    page = "".join((DOCS / name).read_text() for name in ("research/figures.md", "performance.md", "tuning.md"))
    for table in made.stdout.strip().split("\n\n"):
        assert table.strip() in page, f"run python docs/tables.py: {table[:80]}"
    facts = {path.name: json.loads(path.read_text()) for path in (DOCS / "figures").glob("*.json")}
    for name, data in {**facts, "field_table.json": facts["field_table.json"]["public"]}.items():
        assert {"command", "commit", "versions", "clock", "interval"} <= set(data), name


def test_pictures(tmp_path: Path) -> None:
    """Kills: a picture that its command cannot draw any more, has another size, or is large."""
    subprocess.run([sys.executable, "docs/pictures.py", str(tmp_path)], cwd=ROOT, check=True)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (DOCS / "pictures").iterdir())
    for name in drawn:
        committed = (DOCS / "pictures" / name).read_text()
        assert len(committed) < 80_000
        sizes = [re.search(r'viewBox="[^"]*"', text)[0] for text in (committed, (tmp_path / name).read_text())]
        assert sizes[0] == sizes[1], "run python docs/pictures.py"


def test_site(tmp_path: Path) -> None:
    """Kills: a page that is not in the navigation, a broken link, and a page that loads something from the network."""
    pytest.importorskip("material", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert loaded == [], page


@pytest.mark.skipif(os.environ.get("SPECPLUGINS_TESTS") != "all", reason="takes half a minute")
def test_nothing_is_cut(tmp_path: Path) -> None:
    """Kills: a table, a picture or a command that is wider than a phone's or a laptop's page."""
    browser = script("browser.py")
    pytest.importorskip("material", reason="pip install '.[docs]'")
    if browser["BROWSER"] is None:
        pytest.skip("needs chromium")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert asyncio.run(browser["look"](tmp_path)) == []
