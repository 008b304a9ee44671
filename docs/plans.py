"""Writes the tables of plans into the pages that ask for them: `python docs/plans.py`.

A page asks with the comment `Written by docs/plans.py`, and may name the rows: `: suffix_lookup | prompt_lookup, jump`.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_specplugins.methods import runs_target
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.plan import Conditions, make_plan

DOCS = Path(__file__).parent
BLOCK = re.compile(
    r"(<!-- Written by docs/plans\.py(?:: ([^>]*?))?\.? -->\n).*?(<!-- End of the table\. -->)", re.DOTALL
)
FIELDS: dict[str, dict[str, Any]] = {
    "jump": {"head": "folder"},
    "medusa": {"heads": "folder"},
    "remote": {"url": "http://host/v1", "model": "name"},
    "custom": {"proposer": "json:loads"},
    "eagle3": {"model": "name"},
}
METHODS = [
    *("prompt_lookup", "suffix_lookup", "early_exit", "jump", "medusa", "lookahead", "remote", "grammar", "custom"),
    *("prompt_lookup, early_exit", "prompt_lookup, eagle3", "suffix_lookup, early_exit", "prompt_lookup, grammar"),
]
ENGINES = {
    "V2": Conditions(),
    "V2 without trimming": Conditions(untrimmed_for="a reason"),
    "V2, pipeline": Conditions(pipeline_parallel_size=2, world_size=2, untrimmed_for="a pipeline"),
    "V2, synchronous": Conditions(asked_async=False, async_scheduling=False),
}


def configuration(methods: str) -> dict[str, Any]:
    stages = [{"method": name, **FIELDS.get(name, {})} for name in methods.split(", ")]
    return stages[0] if len(stages) == 1 else {"method": "cascade", "stages": stages}


def cell(methods: str, engine: Conditions) -> str:
    """Where a method drafts, on which schedule, and whether its drafts are trimmed."""
    config = parse_config(configuration(methods))
    try:
        plan = make_plan(config, engine)
    except ValueError:
        return "refused"
    refuses = runs_target(config) or config.longest_chain  # engine/target/admission.py, engine/trees.py
    if refuses and engine.pipeline_parallel_size > 1:
        return "refused"
    place = "host" if not plan.on_device else "device and thread" if plan.is_late else "device"
    return f"{place}, {'async' if plan.is_async else 'sync'}{', trimmed' if plan.trims else ''}"


def table(rows: Iterable[str]) -> Iterator[str]:
    yield f"| method, or stages | {' | '.join(ENGINES)} |"
    yield f"|---|{'---|' * len(ENGINES)}"
    for methods in rows:
        names = ", ".join(f"`{name}`" for name in methods.split(", "))
        yield f"| {names} | {' | '.join(cell(methods, engine) for engine in ENGINES.values())} |"


def page(text: str) -> str:
    """A page's text with its tables as they are now."""

    def written(block: re.Match[str]) -> str:
        rows = block[2].split(" | ") if block[2] else METHODS
        return "\n".join([block[1], *table(rows), "", block[3]])

    return BLOCK.sub(written, text)


def pages() -> list[Path]:
    return [path for path in DOCS.rglob("*.md") if BLOCK.search(path.read_text())]


if __name__ == "__main__":
    for path in pages():
        path.write_text(page(path.read_text()))
