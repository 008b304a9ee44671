"""Measures what speculative decoding brings on this machine: real vLLM, real prompts, one request at a time.

    bash examples/quickstart.sh [--model MODEL] [--speculative-config JSON]

Three engines run one after the other, each in a process of its own: no speculation, vLLM's n-gram, and ours.
Without --model they serve the demo model, widened to 217 M parameters: its outputs at a real model's cost.
Exit status: 0; 1 if outputs differ although the engines compute in float32; 2 if something could not be done.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import version
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_specplugins.methods import METHODS, parse_config

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "examples" / "demo"
CACHE = ROOT / ".cache" / "quickstart"
PLAIN, NGRAM = "no speculation", "vLLM's n-gram"
KINDS = {"edit": "Edits (copy-heavy)", "continue": "Code continuation"}
LOOKUP = {"method": "prompt_lookup", "num_speculative_tokens": 5, "max_ngram": 8, "min_ngram": 2}
WARM_UP = "def add(left, right):\n    return left + right\n\n\ndef add(left, right):\n"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
}
LEGEND = """\
tokens/s: all output tokens after each request's first, by the time they took.
tokens/step: output tokens per forward pass. drafted: share of passes with a draft."""

Prompts = list[tuple[str, str]]  # (kind, text)


class QuickstartError(Exception):
    """(message), or (message, log) if the end of a log is worth showing."""


@dataclass(frozen=True)
class Counts:
    """What happened to some requests, from vLLM's own metrics."""

    tokens: int = 0
    requests: int = 0
    decode_seconds: float = 0.0  # from each request's first token to its last
    decode_steps: int = 0  # those in between, without the step that gave the first token
    drafts: int = 0  # steps that had a draft

    def plus(self, other: Self, sign: int = 1) -> Self:
        return type(self)(*(getattr(self, f.name) + sign * getattr(other, f.name) for f in fields(self)))

    @property
    def tokens_per_second(self) -> float:
        return (self.tokens - self.requests) / max(self.decode_seconds, 1e-9)

    @property
    def num_steps(self) -> int:
        return self.decode_steps + self.requests


@dataclass(frozen=True)
class Arm:
    """What one engine did: where it ran, and by kind of prompt its outputs and their counts."""

    machine: str
    dtype: str
    outputs: dict[str, list[list[int]]]
    counts: dict[str, Counts]


def read_counts(llm: Any) -> Counts:
    """The engine's running totals."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    latency = metrics["vllm:inter_token_latency_seconds"]
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    return Counts(
        tokens=metrics["vllm:generation_tokens"].value,
        requests=metrics["vllm:time_to_first_token_seconds"].count,
        decode_seconds=latency.sum,
        decode_steps=latency.count,
        drafts=drafts.value if drafts else 0,
    )


def serve_arm(reports: Connection, log: Path, config: Any, args: argparse.Namespace, prompts: Prompts) -> None:
    """The engine's process: sends (machine, dtype), then (token ids, Counts) per prompt, or an error."""
    redirect_output(log)
    try:
        from vllm import LLM, SamplingParams
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
        llm = LLM(
            str(args.model),
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=1,
            enforce_eager=on_cpu,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=config,
        )
        llm.generate([WARM_UP], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        reports.send((processor_name() if on_cpu else current_platform.get_device_name(), dtype))
        greedy = SamplingParams(temperature=0, max_tokens=args.tokens)
        for _, prompt in prompts:
            before = read_counts(llm)
            [result] = llm.generate([prompt], greedy, use_tqdm=False)
            reports.send((list(result.outputs[0].token_ids), read_counts(llm).plus(before, -1)))
    except Exception as error:
        traceback.print_exc()
        reports.send(str(error) if isinstance(error, ValueError | OSError) else "")


def redirect_output(log: Path) -> None:
    """Sends what this process and its children print to `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def processor_name() -> str:
    """As the operating system calls it, with the number of its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def run_arm(name: str, config: Any, args: argparse.Namespace, prompts: Prompts, advance: Callable[[], None]) -> Arm:
    """Runs one engine from start to end; calls `advance` when it is up and after each prompt."""
    log = CACHE / f"{''.join(letter if letter.isalnum() else '-' for letter in name)}.log"
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve_arm, args=(sender, log, config, args, prompts))
    process.start()
    sender.close()

    def receive() -> Any:
        try:
            message = receiver.recv()
        except EOFError:
            message = ""
        if message == "":
            raise QuickstartError(f"{name}: the engine failed; the end of its log is above.", log)
        if isinstance(message, str):
            raise QuickstartError(f"{name}: {message}")
        advance()
        return message

    try:
        arm = Arm(*receive(), outputs={kind: [] for kind in KINDS}, counts=dict.fromkeys(KINDS, Counts()))
        for kind, _ in prompts:
            token_ids, counts = receive()
            arm.outputs[kind].append(token_ids)
            arm.counts[kind] = arm.counts[kind].plus(counts)
        process.join(timeout=30)
        return arm
    finally:
        process.kill()


def import_vllm_once() -> None:
    """Starts the process that all engines are forked from; its warnings go to a log."""
    multiprocessing.set_forkserver_preload(["vllm.entrypoints.llm"])
    terminal = os.dup(1), os.dup(2)
    redirect_output(CACHE / "import.log")
    forkserver.ensure_running()
    for number, original in enumerate(terminal, start=1):
        os.dup2(original, number)
        os.close(original)


def run_all(configs: dict[str, Any], args: argparse.Namespace) -> dict[str, Arm]:
    """Runs the engines one after the other, with a progress bar."""
    sys.path.insert(0, str(DEMO))
    from prompts import load_prompts

    try:
        prompts = [(kind, prompt) for kind in KINDS for prompt in load_prompts(kind, args.prompts)]
    except ValueError as error:
        raise QuickstartError(f"--prompts: {error}.") from None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(configs) * (1 + len(prompts)))
        arms = {}
        for name, config in configs.items():
            progress.update(task, description=f"{name}: starting vLLM")

            def advance(name: str = name) -> None:
                progress.update(task, description=f"{name}: generating", advance=1)

            arms[name] = run_arm(name, config, args, prompts, advance)
    return arms


def widened_demo_model() -> Path:
    """The demo model at the cost of a larger one, with the same outputs; made on first use."""
    weights = DEMO / "model" / "model.safetensors"
    if not weights.is_file():
        raise QuickstartError(f"the demo model is not at {weights.parent}; name a model with --model.")
    wide = CACHE / f"demo-217m-{zlib.crc32(weights.read_bytes()):08x}"
    if not wide.exists():
        partial = CACHE / "unfinished"
        for old in [partial, *CACHE.glob("demo-217m-*")]:
            shutil.rmtree(old, ignore_errors=True)
        command = [sys.executable, DEMO / "widen.py", weights.parent, partial]
        options = ["--hidden-factor=4", "--intermediate=7680", "--depth-factor=1", "--dtype=bfloat16"]
        with Console(stderr=True).status("Widening the demo model to 217 M parameters (once)"):
            done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode:
            raise QuickstartError(f"the demo model could not be widened: {done.stderr.strip()}")
        partial.rename(wide)
    return wide


def print_table(arms: dict[str, Arm]) -> bool:
    """Prints the comparison; returns whether every output is that of no speculation."""
    same = True
    table = Table(
        title="One request at a time, temperature 0", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False
    )
    for title in ("", "tokens/s", "speed-up", "tokens/step", "drafted", "same output"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for kind, title in KINDS.items():
        table.add_section()
        table.add_row(f"[bold]{title}[/bold]")
        plain = arms[PLAIN]
        for name, arm in arms.items():
            counts, equal = arm.counts[kind], arm.outputs[kind] == plain.outputs[kind]
            same &= equal
            table.add_row(
                f"  {name}",
                f"{counts.tokens_per_second:.1f}",
                f"{counts.tokens_per_second / plain.counts[kind].tokens_per_second:.2f}x",
                f"{counts.tokens / counts.num_steps:.2f}",
                "" if arm is plain else f"{counts.drafts / counts.num_steps:.0%}",
                "" if arm is plain else "yes" if equal else "[bold red]NO[/bold red]",
            )
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "vllm-specplugins"))
    console = Console()
    console.print(table)
    console.print(LEGEND, highlight=False)
    python = platform.python_version()
    console.print(f"{plain.machine}; {plain.dtype}; {versions}, Python {python}", highlight=False)
    return same


def speculative_config(text: str) -> dict[str, Any]:
    """A configuration for one of our methods, from JSON."""
    try:
        config = json.loads(text)
        if not isinstance(config, dict) or config.get("method") not in METHODS:
            raise ValueError(f"must be a JSON object whose method is one of {', '.join(METHODS)}")
        parse_config(config)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return {"num_speculative_tokens": LOOKUP["num_speculative_tokens"], **config}


def model(text: str) -> str:
    if text.startswith((".", "/")) and not Path(text, "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} has no config.json")
    return text


def number_from(low: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, not {text!r}")
        return int(text)

    return number


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares no speculation, vLLM's n-gram and this plugin.")
    parser.add_argument("--model", type=model, help="folder or Hugging Face name (default: the demo model, widened)")
    parser.add_argument("--tokens", type=number_from(2), default=96, help="most output tokens per prompt (default: 96)")
    parser.add_argument("--prompts", type=number_from(1), default=3, help="prompts of each kind (default: 3)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, else bfloat16")
    parser.add_argument(
        "--speculative-config", type=speculative_config, default=LOOKUP, metavar="JSON", help="of our engine"
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    ours = args.speculative_config
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": ours["num_speculative_tokens"],
        "prompt_lookup_max": LOOKUP["max_ngram"],
        "prompt_lookup_min": LOOKUP["min_ngram"],
    }
    os.environ.update(ENVIRONMENT)
    CACHE.mkdir(parents=True, exist_ok=True)
    import_vllm_once()
    try:
        args.model = args.model or widened_demo_model()
        arms = run_all({PLAIN: None, NGRAM: ngram, f"{ours['method']} (ours)": ours}, args)
    except KeyboardInterrupt:
        return 130
    except QuickstartError as error:
        message, *logs = error.args
        for log in logs:
            print(*log.read_text().splitlines()[-30:], sep="\n", file=sys.stderr)
        print(f"error: {message}", file=sys.stderr)
        return 2
    same = print_table(arms)
    if not same and arms[PLAIN].dtype == "float32":
        print("error: speculation changed an output.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
