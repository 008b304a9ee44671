"""What a GPU is wanted for, in the order of what would be missed most: a Markdown report, written as it goes.

    bash tests/gpu.sh [--minutes 25] [--out gpu-report.md]

One engine at a time, each part in a process of its own with a limit of its own; what no time is left for is listed as
not run. Send the report: `docs/figures.md` lists what nobody has run yet.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DEMO, TESTS = ROOT / "examples" / "demo", ROOT / "tests"
ENVIRONMENT = {"SPECPLUGINS_RUNNER": "v2", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1"}
WORKLOADS = ("copy", "random")
TELLING = re.compile(r"^(FAILED|ERROR|exit status)|\b(passed|failed|skipped)\b.* in ")  # of what pytest prints

NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8}
EXIT = {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 4}
ARMS: dict[str, Any] = {
    "no speculation": None,
    "`prompt_lookup`": {"method": "prompt_lookup"},
    **{f"`ngram_gpu`, K = {count}": {**NGRAM, "num_speculative_tokens": count} for count in (5, 15, 31)},
    "`cascade` of lookup and exit": {"method": "cascade", "stages": [{"method": "prompt_lookup"}, EXIT]},
    "`early_exit`": EXIT,
}
DOCTOR, STEPS = ("-m", "vllm_specplugins", "doctor"), "Steps"
PYTEST = ("-m", "pytest", "--import-mode=importlib", "-q", "-p", "no:cacheprovider")
ON_GPU = (*PYTEST, "-m", "gpu", TESTS / "engine" / "test_gpu.py", "-k")
SIZES = ("--requests", "1", "8", "64", "--drafts", "4", "--repeats", "20", "--untested")
NEVER_RUN = {  # of docs/figures.md, "On a GPU": files of engine tests
    "Medusa": "test_medusa.py",
    "look-ahead tokens": "test_early_exit.py",
    "drafters built into vLLM as stages": "test_built_in.py",
    "coupled and probabilistic drafts": "test_exit_sampling.py",
    "jump": "test_jump.py",
    "LoRA": "test_adapters.py",
}
# Title -> arguments of Python's; of pytest only what tells is shown.
PARTS: dict[str, Sequence[str | Path]] = {
    "Self-check": DOCTOR,
    "Identity": (*ON_GPU, "identity"),
    STEPS: (),
    "Kernels: lookup": (TESTS / "bench" / "bench_history_match.py",),
    "Kernels: tests": (*PYTEST, TESTS / "kernels"),
    "Sampled distribution": (*ON_GPU, "not identity"),
    **{f"Never run: {name}": (*PYTEST, TESTS / "engine" / file) for name, file in NEVER_RUN.items()},
    "Kernels: verification": (TESTS / "bench" / "bench_rejection.py", *SIZES),
}
MINUTES = 4  # of a part, at most


@dataclass(slots=True)
class Report:
    """A Markdown file, and when its time is over."""

    out: Path
    ends: float  # time.monotonic

    def say(self, *lines: str) -> None:
        """Appends lines, and prints them."""
        text = "".join(f"{line}\n" for line in lines)
        with self.out.open("a") as file:
            file.write(text)
        print(text, end="", flush=True)

    @property
    def seconds_left(self) -> float:
        return self.ends - time.monotonic()

    def lines_of(self, *arguments: str | Path) -> Iterator[str]:
        """A Python program's lines as they come, and one more if it failed; what it logs goes beside the report."""
        limit = max(1.0, min(60 * MINUTES, self.seconds_left))
        environment = os.environ | (ENVIRONMENT if gpus() else {})  # without one, to try this program: V1
        words = ["timeout", "--kill-after=10", f"{limit:.0f}", sys.executable, *map(str, arguments)]
        with self.out.with_suffix(".log").open("a") as log:
            print("$", *words, file=log, flush=True)
            done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            assert done.stdout is not None
            yield from map(str.rstrip, done.stdout)
        if done.wait():
            yield f"exit status {done.returncode}" + (" (out of time)" if done.returncode in (124, 137) else "")

    def show(self, title: str, arguments: Sequence[str | Path]) -> None:
        """What a program prints; of pytest what failed, and how many passed."""
        shown = " ".join(str(word).removeprefix(f"{ROOT}/") for word in arguments)
        self.say("", f"## {title}", "", f"`python {shown}`", "", "```")
        lines = self.lines_of(*arguments)
        self.say(*(line[:200] for line in lines if "pytest" not in arguments or TELLING.search(line)), "```")


def gpus() -> list[str]:
    """Name and driver of each."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        return []


def step_times(report: Report, model: Path, requests: Sequence[int]) -> None:
    """Speed, tokens a step, host's and device's ms a step, by method and number of requests."""
    keys = [(kind, count) for kind in WORKLOADS for count in requests]
    report.say(
        "",
        f"## {STEPS}",
        "",
        "`tests/gpu/steps.py`, temperature 0, decoding alone, one engine at a time. A cell: speed-up over",
        "no speculation; tokens a step; ms a step of the engine's thread, and by the wall clock: medians over rounds.",
        "",
        f"| | {' | '.join(f'{kind}, {count}' for kind, count in keys)} |",
        f"|{'---|' * (1 + len(keys))}",
    )
    plain: dict[tuple[str, int], float] = {}
    for name, config in ARMS.items():
        asked = ["--model", model, "--requests", *map(str, requests), "--workloads", *WORKLOADS]
        lines = list(report.lines_of(TESTS / "gpu" / "steps.py", json.dumps(config), *asked))
        cells = [json.loads(line) for line in lines if line.startswith("{")]
        found = {(cell["workload"], cell["requests"]): medians(cell["rounds"]) for cell in cells if cell["rounds"]}
        if config is None:
            plain = {key: values["tokens_per_s"] for key, values in found.items()}
        failed = "".join(f" ({line})" for line in lines if line.startswith("exit status"))
        shown = [
            f"{its['tokens_per_s'] / plain.get(key, np.nan):.2f}x; {its['tokens_a_step']:.2f}; {its['host_ms']:.2f}, "
            f"{its['wall_ms']:.2f}"
            if (its := found.get(key))
            else "-"
            for key in keys
        ]
        report.say(f"| {name}{failed} | {' | '.join(shown)} |")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(its[name] for its in rounds) for name in rounds[0]}


def widened(report: Report, folder: Path) -> Path:
    """The demo model at the cost of a model of 3.6 B parameters; made once."""
    if not folder.exists():
        sizes = ["--hidden-factor", "16", "--intermediate", "14336", "--depth-factor", "2"]
        report.say(
            *report.lines_of(DEMO / "widen.py", DEMO / "model", folder, *sizes, "--device", "cuda", "--unchecked")
        )
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--model", type=Path, help="default: the demo model, widened to 3.6 B parameters")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--parts", nargs="+", default=[""], help="of these alone, by the first words of their titles")
    args = parser.parse_args()
    report = Report(args.out, time.monotonic() + 60 * args.minutes)
    args.out.unlink(missing_ok=True)
    model = args.model or widened(report, args.out.with_name("gpu-report-model"))
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    versions = {its.name: its.version for its in distributions() if its.name in ("vllm", "torch", "triton")}
    report.say(
        "# On a GPU",
        "",
        f"* GPU: {', '.join(gpus()) or 'none'}; {os.cpu_count()} CPU cores; Python {platform.python_version()}",
        f"* {', '.join(map(' '.join, sorted(versions.items())))}; commit {commit.strip() or 'unknown'}",
        f"* model: {model.name}; options: {' '.join(sys.argv[1:]) or 'none'}",
    )
    wanted = [title for title in PARTS if title.startswith(tuple(args.parts))]
    for index, title in enumerate(wanted):
        if report.seconds_left < 30:
            report.say("", f"Not run, no time was left: {', '.join(wanted[index:])}.")
            break
        if title == STEPS:
            step_times(report, model, args.requests)
        else:
            report.show(title, PARTS[title])
    report.say("", f"{args.minutes - report.seconds_left / 60:.1f} minutes in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
