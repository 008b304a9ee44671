"""Makes the tables of docs/research/figures.md from the data in docs/figures/, and these data from the programs that measure.

    python docs/tables.py                                                     prints all tables, and rows of docs/performance.md
    python docs/tables.py field_table REPLAY.json --command "python -m vllm_specplugins replay ..."
    python docs/tables.py chat_model BENCH.json --command "python -m vllm_specplugins bench ..."
    python docs/tables.py step_costs HOST.json --command "python benchmarks/bench_host_step.py ..."

The last three take figures out of a program's JSON file. The measured code must be that of a commit of `main`, which
the data name.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "figures"
CODE = "vllm_specplugins", "kernels"
FIELDS = "task", "batch", "method", "policy", "num_draft", "speed_up", "low", "high", "tokens_per_step", "beside"
HOST_METHODS = ["prompt_lookup", "suffix_lookup", "cascade", "early_exit", "jump", "eagle3", "lookup and eagle3"]
ARMS = ["none", "ngram_gpu", *HOST_METHODS]
SHOWN = 1, 32  # requests at a time; the data have more
RULE, NONE, NGRAM = "match of 4 first", "none", "ngram:5"
Facts = dict[str, Any]


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


def commit_of_main() -> str:
    """The last commit of `main` that changed the code, which must be the code that is here."""
    if subprocess.run(["git", "diff", "--quiet", "main", "--", *CODE]).returncode:
        sys.exit("error: the code differs from that of main: land it, and measure again.")
    log = ["git", "log", "-1", "--format=%h", "main", "--", *CODE]
    return subprocess.run(log, capture_output=True, text=True, check=True).stdout.strip()


def of_replay(replay: Facts) -> Facts:
    """The figures of a replay."""
    names = "requests", "prompt_tokens", "output_tokens", "costs", "drafter", "versions"
    made = {
        "clock": "none: steps cost what the source says; drafting and the host are left out",
        "interval": "95 % of 1,000 bootstrap draws of requests",
    }
    rows = [{name: rounded(row[name]) for name in FIELDS} for row in replay["rows"]]
    return {**made, **{name: replay[name] for name in names}, "rows": rows}


def of_bench(bench: Facts) -> Facts:
    """The figures of a benchmark at one batch size and temperature."""
    made: Facts = {
        "clock": "wall, or where a range was wide the CPU time of the engine's thread: `clock` of each row",
        "interval": "95 %, Student's t of the rounds' logarithms",
    }
    from vllm_specplugins.tools.bench.figures import Spread

    names = "tokens_per_second", "tokens_per_step", "repeats", "num_outputs", "num_different", "clock"
    rows, rounds = [], {}
    for row in bench["rows"]:
        own = Spread.of(row["ratio"]["rounds"])
        rounds.setdefault(row["method"], []).append(own.rounds)
        low, high = own.interval()
        figures = {"speed_up": mean(own.rounds), "low": low, "high": high, "step_cost": row["step_cost"]["median"]}
        rows.append({"task": row["cell"]["workload"], "method": row["method"], **{n: row[n] for n in names}, **figures})
    means = {name: Spread.of([*map(mean, zip(*own, strict=True))]) for name, own in rounds.items()}
    made["mean"] = {name: [mean(own.rounds), *own.interval()] for name, own in means.items()}
    made["of_ngram"] = {name: list(own.interval(means[NGRAM])) for name, own in means.items()}
    return rounded({**made, "machine": bench["machine"], "versions": bench["versions"], "rows": rows})


def of_host_step(host: Facts) -> Facts:
    """The figures of the null device."""
    made = {"clock": "CPU time of the engine's thread", "interval": "least and largest of the rounds' minima"}
    return {**made, **rounded(host)}


READERS = {"field_table": of_replay, "chat_model": of_bench, "step_costs": of_host_step}


def best(rows: list[Facts], method: str) -> Facts:
    """The row with the fastest K of a method, with its gate if it has one."""
    candidates = [row for row in rows if row["method"] == method and (row["policy"] != "always" or method == NONE)]
    return max(candidates, key=lambda row: row["speed_up"])


def ratio_of(rows: list[Facts], method: str, others: list[str]) -> list[float]:
    """The speed of a method of the best of others, and its range."""
    rival = max((best(rows, other) for other in others), key=lambda row: row["speed_up"])
    name = NONE if rival["method"] == NONE else f"{rival['method']}, K = {rival['num_draft']}"
    return best(rows, method)["beside"][name]


def cells(data: Facts) -> Iterator[tuple[str, int, list[Facts]]]:
    """Each task and number of requests, with its rows."""
    rows = data["rows"]
    for task, batch in dict.fromkeys((row["task"], row["batch"]) for row in rows):
        name = task.removeprefix("combined_")
        yield name, batch, [row for row in rows if (row["task"], row["batch"]) == (task, batch)]


def table(*columns: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(columns), *lines[1:]]).replace("|  |", "| |").replace("|  |", "| |")


def mean(ratios: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def lookup_table(data: Facts) -> str:
    """A lookup beside vLLM's, on public answers."""
    rows, gains = [], []
    for task, batch, own in cells(data):
        ratio, low, high = ratio_of(own, "prompt_lookup", [NONE, "ngram_gpu"])
        gains.append(ratio)
        theirs, ours = (best(own, name) for name in ("ngram_gpu", "prompt_lookup"))
        if batch in SHOWN:
            rows.append([f"{task}, {batch}", speed(theirs), speed(ours), ranged(ratio, low, high)])
    rows.append(["geometric mean of 1, 8, 32", "", "", f"{mean(gains):.2f}"])
    return table("task, requests", "`ngram_gpu`, best K", "`prompt_lookup`", "ratio to the best other", rows=rows)


def cascade_table(data: Facts) -> str:
    """A lookup and a drafter, on public answers; nothing where no cascade was played."""
    if not any(row["method"] == "cascade" for row in data["rows"]):
        return ""
    rows, drafter = [], data["drafter"].partition(":")[0]
    for task, batch, own in (cell for cell in cells(data) if cell[1] in SHOWN):
        names = drafter, RULE, "cascade"
        speeds = [f"{best(own, name)['speed_up']:.2f}" for name in names]
        of_rule = ranged(*ratio_of(own, "cascade", [RULE]))
        of_stage = ratio_of(own, "cascade", [drafter])[0]
        of_stage = min(of_stage, best(own, "cascade")["speed_up"] / best(own, "prompt_lookup")["speed_up"])
        rows.append([f"{task}, {batch}", *speeds, of_rule, f"{of_stage:.2f}"])
    columns = "task, requests", "drafter", "rule", "cascade", "ratio to rule", "ratio to better stage"
    return table(*columns, rows=rows)


def runners_table(data: Facts) -> str:
    """A lookup and its cascade with a drafter on both model runners, by number of requests."""
    rows, batches = [], sorted({row["batch"] for row in data["rows"]})
    for task, method in dict.fromkeys((row["task"], row["method"]) for row in data["rows"]):
        found = {row["batch"]: row for row in data["rows"] if (row["task"], row["method"]) == (task, method)}
        speeds = [" / ".join(_figure(found.get(batch, {}).get(name)) for batch in batches) for name in ("v1", "v2")]
        rows.append([f"{task.removeprefix('combined_')}, `{method}`", *speeds])
    at = " / ".join(map(str, batches))
    return table("task, method", f"V1, {at} requests", "V2", rows=rows)


def lengths_table(data: Facts) -> str:
    """A lookup with several K, by number of requests."""
    rows = [
        [f"{row['task']}, {row['runner'].upper()}", *(" / ".join(map(_figure, its)) for its in row["by_k"].values())]
        for row in data["rows"]
    ]
    return table("text, runner", *(f"K = {k}" for k in data["rows"][0]["by_k"]), rows=rows)


def _figure(speed_up: float | None) -> str:
    return "-" if speed_up is None else f"{speed_up:.2f}"


def ranged(ratio: float, low: float, high: float) -> str:
    """A ratio with its range."""
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def speed(row: Facts) -> str:
    """A speed-up with its range."""
    return ranged(row["speed_up"], row["low"], row["high"])


def chat_table(data: Facts) -> str:
    """The chat model in an engine, by task."""
    methods = [name for name in dict.fromkeys(row["method"] for row in data["rows"]) if name != NONE]
    rows, found = [], {(row["task"], row["method"]): row for row in data["rows"]}
    for task in dict.fromkeys(row["task"] for row in data["rows"]):
        rows.append([task, *(speed(found[task, name]) for name in methods)])
    rows.append(["geometric mean", *(ranged(*data["mean"][name]) for name in methods)])
    titles = (f"`{name}`".replace(" #2`", "`, no gate") for name in methods)
    return table("task", *titles, rows=rows)


def gpu_table(data: Facts) -> str:
    """What was measured on GPUs."""
    columns = [data["requests"].index(number) for number in SHOWN]
    rows = [[row["task"], *(ranged(*row["by_requests"][column][:3]) for column in columns)] for row in data["rows"]]
    return table("requests at a time", *map(str, SHOWN), rows=rows)


def cost_table(data: Facts) -> str:
    """What a step of each method costs the host."""
    rows = []
    for row in (row for row in data["rows"] if row["arm"] in ARMS):
        figures = " / ".join(f"{us[0]:.0f}" for us in row["us"].values())
        counts: Mapping[str, float] = row["counts"]
        spent = ", ".join(f"{count:g} {name}" for name, count in sorted(counts.items()))
        rows.append([row["arm"], figures, spent])
    sizes = " / ".join(data["rows"][0]["us"])
    return table("method", f"us at {sizes} requests", "per step", rows=rows)


def performance_rows() -> str:
    """The rows of docs/performance.md that come from these tables."""
    public, chat, gpu, costs = map(read, ("field_table", "chat_model", "gpu", "step_costs"))
    own = {(task.replace("instructcoder", "edits"), batch): rows for task, batch, rows in cells(public)}

    def speeds(method: str, *tasks: str) -> str:
        """At 1 and 32 requests, of one task or the range of several."""
        found = [[best(own[task, batch], method)["speed_up"] for task in tasks] for batch in (1, 32)]
        return " / ".join("-".join(dict.fromkeys(f"{end(of):.2f}" for end in (min, max))) + "x" for of in found)

    def served_by(method: str) -> str:
        found = [row["speed_up"] for row in chat["rows"] if row["method"] == method]
        return f"{mean(found):.2f}x ({min(found):.2f}-{max(found):.2f})"

    def us(arm: str) -> str:
        row = next(row for row in costs["rows"] if row["arm"] == arm)
        return f"{row['us']['1'][0]:.0f} / {row['us']['32'][0]:.0f} us"

    rows = []
    for words, tasks in (("code edits", ["edits"]), ("summaries, chat, maths", ["cnn", "sharegpt", "gsm8k"])):
        ours, theirs = (speeds(method, *tasks) for method in ("prompt_lookup", "ngram_gpu"))
        rows.append([words, "replayed, V1", "`prompt_lookup`", ours, f"n-gram {theirs}"])
    if cascade_table(public):
        rule = f"TensorRT-LLM's rule {speeds(RULE, 'edits')}"
        rows.append(["code edits with EAGLE", "replayed, V1", "`cascade`", speeds("cascade", "edits"), rule])
    theirs = f"n-gram {served_by(NGRAM)}"
    rows.append(["eight tasks, SmolLM2", "CPU", "`prompt_lookup`", served_by("prompt_lookup"), theirs])
    found = {row["task"]: row["by_requests"] for row in gpu["rows"]}
    vllm, lookup = (
        " / ".join(f"{found[name][at][0]:.2f}x" for at in (0, 2))
        for name in ("copy, vLLM's `ngram_gpu`", "copy, `prompt_lookup`")
    )
    rows.append(["copies of a text, 0.1.0", "H100", "`prompt_lookup`", lookup, f"`ngram_gpu` {vllm}"])
    theirs = f"n-gram {us('ngram_gpu')}"
    rows.append(["host time per step", "null device", "`prompt_lookup`", us("prompt_lookup"), theirs])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


TABLES = {
    "field_table": (lookup_table, cascade_table),
    "runners": (runners_table,),
    "lengths_by_k": (lengths_table,),
    "chat_model": (chat_table,),
    "gpu": (gpu_table,),
    "step_costs": (cost_table,),
}


def read(name: str) -> Facts:
    """The data of a table; of the field table those of public answers."""
    data = json.loads((FIGURES / f"{name}.json").read_text())
    return data.get("public", data)


def write(name: str, key: str | None, facts: Facts) -> None:
    """Stores data, one row on a line."""
    path = FIGURES / f"{name}.json"
    if key is not None:
        facts = {**(json.loads(path.read_text()) if path.exists() else {}), key: facts}
    text = json.dumps(facts, separators=(",", ":"))
    path.write_text(text.replace('{"task"', '\n{"task"').replace('{"arm"', '\n{"arm"') + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=list(READERS), nargs="?")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--key", help="part of the data: field_table has public and made")
    parser.add_argument("--command", default="")
    parser.add_argument("--commit", help="the commit of main that was measured (default: its last one)")
    args = parser.parse_args()
    if args.name:
        made = {"command": args.command, "commit": args.commit or commit_of_main()}
        write(args.name, args.key, {**made, **READERS[args.name](json.loads(args.file.read_text()))})
    for name, tables in TABLES.items():
        sys.stdout.write("".join(f"{made}\n\n" for make in tables if (made := make(read(name)))))
    sys.stdout.write(f"{performance_rows()}\n")


if __name__ == "__main__":
    main()
