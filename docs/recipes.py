"""Writes the recipes of docs/choose-a-method.md from examples/recipes.json: `python docs/recipes.py`."""

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_specplugins.parsing import parse_config
from vllm_specplugins.plan import Conditions, make_plan

PAGE = Path(__file__).with_name("choose-a-method.md")
os.environ.setdefault("REDIS_URL", "redis://localhost:6379")
RECIPES: list[dict[str, Any]] = json.loads((PAGE.parents[1] / "examples" / "recipes.json").read_text())
BLOCK = re.compile(r"(<!-- Written by docs/recipes\.py from .*? -->\n).*?(<!-- End of the recipes\. -->)", re.DOTALL)
BEGINNING = """
Each recipe is a start of `vllm serve`. None has run on a GPU. A test parses each with vLLM's parser, and plans those
without a drafter of vLLM on a CPU. The plan and the sizes are computed for one GPU of each engine.
"""


def value(recipe: dict[str, Any], name: str) -> int:
    return int(recipe["arguments"][recipe["arguments"].index(name) + 1])


def sizes(recipe: dict[str, Any], num_draft: int) -> str:
    """The memory of token ids and bitmasks, as docs/tuning.md explains it."""
    num_reqs = value(recipe, "--max-num-seqs")
    masks = 4 * num_reqs * (1 + num_draft) * -(-recipe["vocab_size"] // 32) / 2**20
    ids = 4 * num_reqs * value(recipe, "--max-model-len") / 2**20
    return f"token ids {ids:.0f} MiB, bitmasks of structured output up to {masks:.0f} MiB"


def page() -> str:
    made = BEGINNING + "".join(f"\n{line}\n" for recipe in RECIPES for line in section(recipe))
    return BLOCK.sub(lambda block: f"{block[1]}{made}\n{block[2]}", PAGE.read_text())


def section(recipe: dict[str, Any]) -> Iterator[str]:
    config = parse_config(recipe["config"])
    plan = make_plan(config, Conditions(**recipe["conditions"]))
    raw = json.dumps(recipe["config"], separators=(",", ":"))
    lines = [shlex.join(["vllm", "serve", *recipe["arguments"][:1]])]
    for word in recipe["arguments"][1:]:
        if word.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    yield f"### {recipe['title']}"
    yield recipe["words"]
    yield "```bash\n" + " \\\n    ".join([*lines, f"--speculative-config {shlex.quote(raw)}"]) + "\n```"
    yield f"K is {config.length}: {sizes(recipe, config.length)}. Plan: {plan}"


if __name__ == "__main__":
    PAGE.write_text(page())
