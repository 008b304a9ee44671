"""The command `bench`: starts an engine for each method, lets them take turns, and reports."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError
from vllm_specplugins.engine.harness.serving import Machine, ServingEngine, Traffic, Turn
from vllm_specplugins.tools.base_model import load_config, load_tokenizer
from vllm_specplugins.tools.bench.advice import advice
from vllm_specplugins.tools.bench.data import read_workloads
from vllm_specplugins.tools.bench.figures import Cell, Row, rows_of
from vllm_specplugins.tools.bench.report import Report, facts, show
from vllm_specplugins.tools.bench.rounds import serve_rounds
from vllm_specplugins.tools.bench.workloads import Workload, make_workload
from vllm_specplugins.tools.picker import NONE, Config, pick_methods
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import Point, check_files, plot, stdout, write_json

DEFAULT_WORKLOADS = ("code", "copy", "chat", "random")
MEMORY_SHARE = 0.9  # of a GPU, for all engines together
GIB = 1 << 30
ENGINE_GIB = 1.5  # of a CPU's memory that an engine takes beside weights and KV cache


@dataclass(frozen=True, slots=True)
class Served:
    """What engines did.

    Args:
        turns: by cell and method.
        arguments: that all engines had.
        together: they took turns.
    """

    turns: dict[Cell, dict[str, list[Turn]]]
    machine: Machine
    arguments: Mapping[str, Any]
    together: bool

    def rows(self) -> list[Row]:
        return [row for cell, turns in self.turns.items() for row in rows_of(cell, turns)]


def run(args: argparse.Namespace) -> int:
    """The command; prints its report, and returns 0, or 1 if speculation changed an output."""
    configs = pick_methods(args.methods)
    check_files(args)
    workloads = pick_workloads(args)
    with progress() as bars:
        served = serve(args, configs, workloads, bars, has_memory(args.model, len(configs)))
    return report(args, report_of(args, configs, workloads, served))


def serve(
    args: argparse.Namespace,
    configs: Mapping[str, Config | None],
    workloads: Sequence[Workload],
    bars: Progress,
    together: bool,
) -> Served:
    """All cells, with engines that take turns if they may all be up together, or else one engine after the other."""
    groups = [configs] if together else [{name: config} for name, config in configs.items()]
    arguments = engine_arguments(args, len(groups[0]), workloads)
    cells = [
        (workload, Cell(workload.name, batch, temperature))
        for temperature in args.temperature for workload in workloads for batch in args.batch
    ]  # fmt: skip
    task = bars.add_task("", total=len(configs) + len(groups) * len(cells) * (1 + args.rounds))
    turns: dict[Cell, dict[str, list[Turn]]] = {}

    def advance(words: str | None = None) -> None:
        bars.update(task, advance=words is None, description=words)

    for group in groups:
        with engines_up(group, arguments, advance) as (engines, machine):
            served = Served(turns, machine, arguments, together)
            for workload, cell in cells:
                advance(f"{cell}{so_far(served.rows()) if NONE in configs else ''}")
                turns.setdefault(cell, {}).update(serve_rounds(engines, rounds_of(args, workload, cell), advance))
    return served


def has_memory(model: str, num_engines: int) -> bool:
    """Whether as many engines may be up together; on a GPU they share its memory."""
    import torch

    if torch.cuda.is_available():
        return True
    import psutil  # type: ignore[import-untyped]  # comes with vLLM

    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    asked = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    cache = (int(asked) if asked.isdecimal() else 1) * GIB
    return bool(num_engines * (ENGINE_GIB * GIB + cache + weights) <= psutil.virtual_memory().available)


def report_of(
    args: argparse.Namespace, configs: Mapping[str, Config | None], workloads: Sequence[Workload], served: Served
) -> Report:
    """The report on what was served."""
    conditions = {"model": args.model, "rounds": args.rounds, "prompts": args.prompts, "tokens": args.tokens}
    conditions |= {
        "together": served.together,
        "arguments": served.arguments,
        "keeps": [workload.name for workload in workloads if workload.keeps],
        "short": [workload.name for workload in workloads if workload.is_short(num_prompts(args))],
    }
    return Report(served.rows(), configs, served.machine, conditions)


def rounds_of(args: argparse.Namespace, workload: Workload, cell: Cell) -> list[Traffic]:
    """What each round of a cell asks, a first one to warm up with: prompts of its own, as a tenant of its own."""
    prompts = workload.rounds(max(args.prompts, cell.batch), 1 + args.rounds)
    return [
        Traffic(
            prompts=own,
            temperature=cell.temperature,
            max_tokens=args.tokens,
            at_a_time=cell.batch,
            ignore_eos=args.ignore_eos,
            salt=str(cell) if workload.keeps else f"{cell}, round {index}",
        )
        for index, own in enumerate(prompts)
    ]


def so_far(rows: Sequence[Row]) -> str:
    """The speeds of the last cell."""
    words = ", ".join(f"{row.method} {row.ratio.median:.2f}x" for row in rows if row.cell == rows[-1].cell)
    return f" (after {rows[-1].cell}: {words})" if rows else ""


def report(args: argparse.Namespace, found: Report, more: Mapping[str, Any] | None = None) -> int:
    """Prints and writes what was found, and in the file `more`; the exit status."""
    show(found, stdout(), args.wide)
    if args.json:
        write_json(facts(found) | dict(more or {}), args.json)
    if args.plot:
        title = f"{Path(args.model).name}, {found.machine.dtype}, {found.machine.device}"
        doubt, color = advice(found.rows, found.configs).partition(". ")[0], "C3"
        if not doubt.startswith("No advice"):
            doubt, color = "", "black"
        plot(args.plot, f"{title}\n{doubt}", panels(found.rows), color)
    return 0 if found.is_lossless else 1


def panels(rows: Sequence[Row]) -> dict[str, dict[str, list[Point]]]:
    """The ratios by temperature and method."""
    drawn: dict[str, dict[str, list[Point]]] = {}
    for cell, method, ratio in ((row.cell, row.method, row.ratio) for row in rows if row.method != NONE):
        of = f"{cell.workload}\n{cell.batch} at a time"
        points = drawn.setdefault(f"temperature {cell.temperature:g}", {}).setdefault(method, [])
        points.append((of, ratio.median, ratio.low, ratio.high))
    return drawn


def pick_workloads(args: argparse.Namespace) -> list[Workload]:
    """The user's, and those built in that the user names; all of these but REPEAT without any data.

    Raises:
        ConfigError: see make_workload, read_workloads and load_tokenizer.
    """
    tokenizer = load_tokenizer(args.model)
    count = num_prompts(args)
    names: Sequence[str] = args.workloads or (() if args.data else DEFAULT_WORKLOADS)
    made = [make_workload(name, tokenizer, count, args.prompt_tokens) for name in names]
    made += [workload for file in args.data for workload in read_workloads(file, tokenizer, count, args.prompt_tokens)]
    return [replace(workload, keeps=args.keep or workload.keeps) for workload in made]


def num_prompts(args: argparse.Namespace) -> int:
    """So many of a workload are served, the first round's among them."""
    return int(max(args.prompts, *args.batch) * (1 + args.rounds))


def engine_arguments(args: argparse.Namespace, num_engines: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that so many engines share; the user's own come last.

    Raises:
        ConfigError: a prompt and its output do not fit into the model's context.
    """
    longest = max(len(prompt) for workload in workloads for prompt in workload.prompts)
    context = getattr(load_config(args.model), "max_position_embeddings", None) or longest + args.tokens
    if longest + args.tokens > context:
        raise ConfigError(
            f"--tokens must be at most {max(0, context - longest)} behind these prompts, not {args.tokens}."
        )
    return {
        "model": args.model,
        "max_model_len": min(context, longest + args.tokens + MAX_NUM_SPECULATIVE_TOKENS),
        "max_num_seqs": max(args.batch),
        "gpu_memory_utilization": round(MEMORY_SHARE / num_engines, 3),
        **({"dtype": args.dtype} if args.dtype else {}),
        **args.engine_args,
    }


@contextmanager
def engines_up(
    configs: Mapping[str, Config | None], arguments: Mapping[str, Any], advance: Callable[..., None]
) -> Iterator[tuple[dict[str, ServingEngine], Machine]]:
    """All engines, started one after the other, and what they run on.

    Raises:
        ConfigError: one that does not start; its log is kept.
    """
    logs = Path(tempfile.mkdtemp(prefix="specplugins-"))
    with ExitStack() as stack:
        engines: dict[str, ServingEngine] = {}
        for number, (name, config) in enumerate(configs.items()):
            advance(f"{name}: starting vLLM")
            engine = ServingEngine(name, arguments, config, logs / f"engine-{number}.log")
            engines[name] = stack.enter_context(engine)
            machine = engine.wait()
            advance()
        yield engines, machine
    shutil.rmtree(logs)
