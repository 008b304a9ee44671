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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO, TESTS = ROOT / "examples" / "demo", ROOT / "tests"
ENVIRONMENT = {"SPECPLUGINS_RUNNER": "v2", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_NO_USAGE_STATS": "1"}
WORKLOADS = ("copy", "random")
TELLING = re.compile(r"^(FAILED|ERROR|exit status)|\b(passed|failed|skipped)\b.* in ")  # of what pytest prints

NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 8}
EXIT = {"method": "early_exit", "exit_layer": 2, "num_speculative_tokens": 4}
ARMS: Mapping[str, dict[str, Any] | None] = {
    "no speculation": None,
    "`prompt_lookup`": {"method": "prompt_lookup"},
    **{f"`ngram_gpu`, K = {count}": {**NGRAM, "num_speculative_tokens": count} for count in (5, 15, 31)},
    "`cascade` of lookup and exit": {"method": "cascade", "stages": [{"method": "prompt_lookup"}, EXIT]},
    "`early_exit`": EXIT,
}
NEVER_RUN = {  # of docs/figures.md, "On a GPU": files of engine tests
    "Medusa": "test_medusa.py",
    "look-ahead tokens": "test_look_ahead.py",
    "drafters built into vLLM as stages": "test_built_in.py",
    "coupled and probabilistic drafts": "test_exit_sampling.py",
    "jump": "test_jump.py",
    "LoRA": "test_adapters.py",
}


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

    def lines_of(self, command: Sequence[str | Path], seconds: float) -> Iterator[str]:
        """A command's lines as they come, and one more if it failed; what it logs goes to a file beside the report."""
        limit = max(1.0, min(seconds, self.seconds_left))
        environment = os.environ | (ENVIRONMENT if gpus() else {})  # without one, to try this program: V1
        words = ["timeout", "--kill-after=10", f"{limit:.0f}", *map(str, command)]
        with self.out.with_suffix(".log").open("a") as log:
            print("$", *words, file=log, flush=True)
            done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            assert done.stdout is not None
            yield from map(str.rstrip, done.stdout)
        if done.wait():
            yield f"exit status {done.returncode}" + (" (out of time)" if done.returncode in (124, 137) else "")


def machine(report: Report, model: Path) -> None:
    """What it was run on."""
    names = ("vllm", "torch", "triton", "vllm-specplugins")
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    report.say(
        "# On a GPU",
        "",
        f"* GPU: {', '.join(gpus()) or 'none'}; {os.cpu_count()} CPU cores; Python {platform.python_version()}",
        f"* {', '.join(f'{name} {installed(name)}' for name in names)}; commit {commit.strip() or 'unknown'}",
        f"* model: {model.name}; options: {' '.join(sys.argv[1:]) or 'none'}",
    )


def gpus() -> list[str]:
    """Name and driver of each."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines()
    except OSError:
        return []


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def program(report: Report, title: str, *command: str | Path, minutes: float = 3) -> None:
    """What a program prints, as it is."""
    shown = " ".join(str(word).removeprefix(f"{ROOT}/") for word in command)
    report.say("", f"## {title}", "", f"`python {shown}`", "", "```")
    report.say(*report.lines_of([sys.executable, *command], 60 * minutes), "```")


def tests(report: Report, title: str, *arguments: str | Path, minutes: float = 4) -> None:
    """A run of pytest: what failed, and how many passed."""
    shown = " ".join(str(word).removeprefix(f"{ROOT}/") for word in arguments)
    report.say("", f"## {title}", "", f"`pytest {shown}`", "")
    command = [sys.executable, "-m", "pytest", "--import-mode=importlib", "-q", "-p", "no:cacheprovider", *arguments]
    report.say(*(f"* {line[:200]}" for line in report.lines_of(command, 60 * minutes) if TELLING.search(line)))


def step_times(report: Report, model: Path, arms: Sequence[str], requests: Sequence[int], options: list[str]) -> None:
    """Speed, tokens a step, host's and device's ms a step, by method and number of requests."""
    keys = [(kind, count) for kind in WORKLOADS for count in requests]
    report.say(
        "",
        "## Steps",
        "",
        "`tests/gpu/steps.py`, temperature 0, decoding alone, one engine at a time. A cell: speed-up over",
        "no speculation; tokens a step; ms a step of the engine's thread, and by the wall clock: medians over rounds.",
        "",
        f"| | {' | '.join(f'{kind}, {count}' for kind, count in keys)} |",
        f"|{'---|' * (1 + len(keys))}",
    )
    plain: dict[tuple[str, int], float] = {}
    for name in arms:
        if report.seconds_left < 60:
            report.say(f"| {name}: not run, no time was left |")
            continue
        counts = [str(count) for count in requests]
        command = [sys.executable, TESTS / "gpu" / "steps.py", json.dumps(ARMS[name]), "--model", model]
        lines = list(report.lines_of([*command, "--requests", *counts, "--workloads", *WORKLOADS, *options], 240))
        cells = [json.loads(line) for line in lines if line.startswith("{")]
        found = {(cell["workload"], cell["requests"]): cell["rounds"] for cell in cells if cell["rounds"]}
        if ARMS[name] is None:
            plain = {key: middle(rounds, "tokens_per_s") for key, rounds in found.items()}
        failed = "".join(f" ({line})" for line in lines if line.startswith("exit status"))
        report.say(f"| {name}{failed} | {' | '.join(cell(found.get(key), plain.get(key)) for key in keys)} |")


def cell(rounds: list[dict[str, float]] | None, plain: float | None) -> str:
    if not rounds:
        return "-"
    speed = "" if plain is None else f"{middle(rounds, 'tokens_per_s') / plain:.2f}x; "
    times = f"{middle(rounds, 'host_ms'):.2f}, {middle(rounds, 'wall_ms'):.2f}"
    return f"{speed}{middle(rounds, 'tokens_a_step'):.2f}; {times}"


def middle(rounds: list[dict[str, float]], name: str) -> float:
    return statistics.median(its[name] for its in rounds)


def widened(report: Report, folder: Path) -> Path:
    """The demo model at the cost of a model of 3.6 B parameters; made once."""
    if not folder.exists():
        sizes = ["--hidden-factor", "16", "--intermediate", "14336", "--depth-factor", "2"]
        command = [sys.executable, DEMO / "widen.py", DEMO / "model", folder, *sizes, "--device", "cuda", "--unchecked"]
        report.say(*report.lines_of(command, 180))
    return folder


def all_parts(report: Report, model: Path, args: argparse.Namespace) -> dict[str, Callable[[str], None]]:
    """What is done, by title, in order."""
    on_gpu, bench = ("-m", "gpu", TESTS / "engine" / "test_gpu.py"), TESTS / "bench"
    sizes = ["--requests", "1", "8", "64", "--drafts", "4", "--repeats", "20", "--untested"]
    return {
        "Self-check": lambda title: program(report, title, "-m", "vllm_specplugins", "doctor"),
        "Identity": lambda title: tests(report, title, *on_gpu, "-k", "identity"),
        "Steps": lambda title: step_times(report, model, args.arms, args.requests, args.steps_options),
        "Kernels: lookup": lambda title: program(report, title, bench / "bench_history_match.py"),
        "Kernels: tests": lambda title: tests(report, title, TESTS / "kernels", minutes=5),
        "Sampled distribution": lambda title: tests(report, title, *on_gpu, "-k", "not identity"),
        **{
            f"Never run: {name}": lambda title, file=file: tests(report, title, TESTS / "engine" / file, minutes=3)
            for name, file in NEVER_RUN.items()
        },
        "Kernels: verification": lambda title: program(report, title, bench / "bench_rejection.py", *sizes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--model", type=Path, help="default: the demo model, widened to 3.6 B parameters")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--parts", nargs="+", default=[""], help="of these alone, by the first words of their titles")
    parser.add_argument("--steps-options", action="append", default=[], help="a word handed on to tests/gpu/steps.py")
    args = parser.parse_args()
    report = Report(args.out, time.monotonic() + 60 * args.minutes)
    args.out.unlink(missing_ok=True)
    model = args.model or widened(report, args.out.with_name("gpu-report-model"))
    machine(report, model)
    parts = all_parts(report, model, args)
    wanted = [title for title in parts if title.startswith(tuple(args.parts))]
    for index, title in enumerate(wanted):
        if report.seconds_left < 30:
            report.say("", f"Not run, no time was left: {', '.join(wanted[index:])}.")
            break
        parts[title](title)
    report.say("", f"{args.minutes - report.seconds_left / 60:.1f} minutes in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
