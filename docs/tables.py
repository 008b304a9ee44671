"""Makes the field table: data from what `replay --json` wrote, and the Markdown of docs/figures.md from these data.

    python docs/field_table.py REPLAY.json --key public --command "python -m vllm_specplugins replay ..."

It prints the Markdown; without arguments that of the data as they are.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "figures" / "field_table.json"
CLOCK = "none: steps cost what the source says; drafting and the host are left out"
INTERVAL = "95 % of 1,000 bootstrap draws of requests"
FIELDS = "task", "batch", "method", "policy", "num_draft", "speed_up", "low", "high", "tokens_per_step", "beside"
RULE, NONE = "match of 4 first", "none"


def rounded(value: Any) -> Any:
    """Figures with four places."""
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {key: rounded(item) for key, item in value.items()}
        case list():
            return [rounded(item) for item in value]
    return value


def facts_of(replay: dict[str, Any], command: str) -> dict[str, Any]:
    """The figures of a replay, with the command, commit and clock that made them."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    names = "requests", "prompt_tokens", "output_tokens", "costs", "drafter", "versions"
    rows = [{name: rounded(row[name]) for name in FIELDS} for row in replay["rows"]]
    made = {"command": command, "commit": commit.strip(), "clock": CLOCK, "interval": INTERVAL}
    return {**made, **{name: replay[name] for name in names}, "rows": rows}


def best(rows: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """The row with the fastest K of a method, with its gate if it has one."""
    own = [row for row in rows if row["method"] == method and (row["policy"] != "always" or method == NONE)]
    return max(own, key=lambda row: row["speed_up"])


def ratio_of(rows: list[dict[str, Any]], method: str, others: list[str]) -> list[float]:
    """The speed of a method of the best of others, and its range."""
    rival = max((best(rows, other) for other in others), key=lambda row: row["speed_up"])
    name = NONE if rival["method"] == NONE else f"{rival['method']}, K = {rival['num_draft']}"
    ratio: list[float] = best(rows, method)["beside"][name]
    return ratio


def cells(data: dict[str, Any]) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Each task and number of requests, with its rows."""
    rows = data["rows"]
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in rows):
        yield task, batch, [row for row in rows if (row["task"], row["batch"]) == (task, batch)]


def markdown(data: dict[str, Any]) -> str:
    """The table of a lookup, and with a cascade that of both."""
    lookup = ["| task, requests | `ngram_gpu`, best K | `prompt_lookup` | of the best |", "|---|---|---|---|"]
    cascade = [
        "| task, requests | drafter | rule | cascade | oracle | of the rule | of the better stage |",
        "|" + "---|" * 7,
    ]
    gains, drafter = [], data["drafter"].partition(":")[0]
    for task, batch, rows in cells(data):
        ratio, low, high = ratio_of(rows, "prompt_lookup", [NONE, "ngram_gpu"])
        gains.append(ratio)
        speeds = {name: best(rows, name)["speed_up"] for name in ("ngram_gpu", "prompt_lookup", drafter, RULE)}
        lookup.append(
            f"| {task.removeprefix('combined_')}, {batch} | {speeds['ngram_gpu']:.2f} | {speeds['prompt_lookup']:.2f} "
            f"| {ratio:.2f} ({low:.2f}-{high:.2f}) |"
        )
        if not any(row["method"] == "cascade" for row in rows):
            continue
        own, oracle = best(rows, "cascade"), best(rows, "oracle of both")["speed_up"]
        ratio, low, high = ratio_of(rows, "cascade", [RULE])
        of_stage = own["speed_up"] / max(speeds["prompt_lookup"], speeds[drafter])
        cascade.append(
            f"| {task.removeprefix('combined_')}, {batch} | {speeds[drafter]:.2f} | {speeds[RULE]:.2f} | {own['speed_up']:.2f} | {oracle:.2f} "
            f"| {ratio:.2f} ({low:.2f}-{high:.2f}) | {of_stage:.2f} |"
        )
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    lookup.append(f"| geometric mean | | | {mean:.2f} |")
    return "\n".join([*lookup, "", *cascade] if cascade[2:] else lookup)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("replay", type=Path, nargs="?")
    parser.add_argument("--key", default="public")
    parser.add_argument("--command", default="")
    args = parser.parse_args()
    known = json.loads(DATA.read_text()) if DATA.exists() else {}
    if args.replay:
        known[args.key] = facts_of(json.loads(args.replay.read_text()), args.command)
        DATA.write_text(json.dumps(known, separators=(",", ":")).replace('{"task"', '\n{"task"') + "\n")
    sys.stdout.write(markdown(known[args.key]) + "\n")


if __name__ == "__main__":
    main()
