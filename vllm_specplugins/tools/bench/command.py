"""The command `bench`: one engine per method. The engines take turns if memory permits it."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from random import Random
from typing import Any

import torch
from rich.progress import Progress

from vllm_specplugins.config import MAX_NUM_SPECULATIVE_TOKENS, ConfigError
from vllm_specplugins.engine.harness.process import EngineProcess, fit_together
from vllm_specplugins.engine.harness.serving import serve_rounds, serving_engine
from vllm_specplugins.engine.harness.traffic import Forced, Machine, Traffic, Turn
from vllm_specplugins.tools.base_model import load_config, load_tokenizer
from vllm_specplugins.tools.bench.figures import Cell, rows_of, step_ms_by_tokens
from vllm_specplugins.tools.bench.report import Report, tell, tell_cell
from vllm_specplugins.tools.bench.workloads import DEFAULT, Workload, make_workload, read_log, read_workloads
from vllm_specplugins.tools.files import CHAT_MODEL, scratch
from vllm_specplugins.tools.picker import NONE, Config, pick_methods
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.report import check_json

LOOKUPS = ["ngram", "prompt_lookup"]
TOKENS = 64  # length limit of an output
MAX_OPEN = 256  # maximum number of concurrent requests if they arrive at a rate
MEMORY_SHARE = 0.9  # of a GPU, for all engines together
Turns = dict[Cell, dict[str, list[Turn]]]  # by cell and method


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if speculation changed an output."""
    if not args.trace and (args.rate or args.drafter):
        raise ConfigError("--rate and --drafter need --trace.")
    if args.trace and (args.workloads or args.dataset_path):
        raise ConfigError("remove --workloads and --dataset-path: the log of --trace is the workload.")
    configs = pick_methods(args.methods or (LOOKUPS if args.trace else [*LOOKUPS, "cascade"]))
    if not args.model and not (CHAT_MODEL / "config.json").is_file():
        raise ConfigError(
            f"--model is missing, and {CHAT_MODEL} has no chat model; name a model, or run `python "
            "examples/chat_model.py` in a clone of this repository, which makes it in half a minute."
        )
    args.model = args.model or str(CHAT_MODEL)
    check_json(args)
    workloads = [read_log(args, configs)] if args.trace else pick_workloads(args)
    log = workloads[0].log
    args.output_len = args.output_len or (max(map(len, log.outputs)) if log else TOKENS)
    with progress() as bars:
        report = measure(args, configs, workloads, bars, fit_together(args.model, len(configs)))
    return tell(args, report)


def measure(
    args: argparse.Namespace,
    configs: Mapping[str, Config | None],
    workloads: Sequence[Workload],
    bars: Progress,
    together: bool,
) -> Report:
    """Serves all cells with all methods, beginning with no speculation, and prints each cell when it is done. The
    engines take turns, or serve one after another."""
    groups = [configs] if together else [{name: config} for name, config in configs.items()]
    arguments, turns = engine_arguments(args, len(groups[0]), workloads), Turns()
    cells = [
        (workload, Cell(workload.name, batch, temperature))
        for temperature in args.temperature for workload in workloads for batch in args.max_concurrency
    ]  # fmt: skip
    cells += [(workload, Cell(workload.name, MAX_OPEN, 0.0, rate)) for workload in workloads for rate in args.rate]
    logs = {workload.name: workload.log.outputs for workload in workloads if workload.log}
    on_cpu = not torch.cuda.is_available()
    task = bars.add_task("", total=len(configs) + len(groups) * len(cells) * (1 + args.rounds))

    def advance(words: str | None = None) -> None:
        bars.update(task, advance=words is None, description=words)

    for group in groups:
        with engines_up(group, arguments, advance, workloads[0].log) as (engines, machine):
            for workload, cell in cells:
                advance(str(cell))
                traffic = rounds_of(args, workload, cell, turns)
                turns.setdefault(cell, {}).update(serve_rounds(engines, traffic, advance))
                tell_cell(rows_of(cell, turns[cell], on_cpu, logs.get(cell.workload))[-len(engines) :])
    conditions = {
        **{"model": args.model, "rounds": args.rounds, "prompts": args.num_prompts, "tokens": args.output_len},
        "together": together,
        "arguments": arguments,
        "forced": bool(logs),
        "short": [workload.name for workload in workloads if workload.is_short(num_prompts(args))],
    }
    rows = [row for cell, played in turns.items() for row in rows_of(cell, played, on_cpu, logs.get(cell.workload))]
    closed = [turn for cell, played in turns.items() if not cell.rate for its in played.values() for turn in its[1:]]
    return Report(rows, configs, machine, conditions, step_ms_by_tokens(closed))


def rounds_of(args: argparse.Namespace, workload: Workload, cell: Cell, turns: Turns) -> list[Traffic]:
    """Yields the traffic of the warm-up and of each round. Each round has a separate tenant and, except for a log, new
    prompts. For a cell with a rate, the `turns` of no speculation determine its rate."""
    rounds, log = workload.rounds(max(args.num_prompts, cell.batch), 1 + args.rounds), workload.log
    return [
        Traffic(
            prompts=prompts,
            temperature=cell.temperature,
            output_lengths=[*map(len, log.outputs)] if log else args.output_len,
            at_a_time=cell.batch,
            ignore_eos=args.ignore_eos or log is not None,
            salt=f"{cell}, round {index}",
            arrivals=arrivals(cell, len(prompts), turns) if cell.rate else None,
            logged=range(len(prompts)) if log else None,
        )
        for index, prompts in enumerate(rounds)
    ]


def arrivals(cell: Cell, count: int, turns: Turns) -> list[float]:
    """Returns arrival times of requests in seconds: a Poisson process, the same in each run."""
    closed = [other for other in turns if other.workload == cell.workload and not other.rate]
    plain = turns[max(closed, key=lambda other: other.batch)][NONE][1:]
    rate = cell.rate * sum(len(turn.answers) for turn in plain) / sum(turn.seconds for turn in plain)
    random = Random(0)
    return list(accumulate(random.expovariate(rate) for _ in range(count)))


def pick_workloads(args: argparse.Namespace) -> list[Workload]:
    """Returns the tasks that the user names, and the user's files; DEFAULT if there are neither."""
    tokenizer, count = load_tokenizer(args.model), num_prompts(args)
    names: Sequence[str] = args.workloads or (() if args.dataset_path else DEFAULT)
    tasks = [make_workload(name, tokenizer, count) for name in names]
    return tasks + [
        its for file in args.dataset_path for its in read_workloads(file, tokenizer, count, args.prompt_tokens)
    ]


def num_prompts(args: argparse.Namespace) -> int:
    """Returns the number of prompts of a workload, including the warm-up."""
    return int(max(args.num_prompts, *args.max_concurrency) * (1 + args.rounds))


def engine_arguments(args: argparse.Namespace, num_engines: int, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Returns arguments of `vllm.LLM`; the user's arguments take precedence. Raises ConfigError if a prompt and its
    output exceed the model's length."""
    longest = max(len(prompt) for workload in workloads for prompt in workload.prompts)
    context = getattr(load_config(args.model), "max_position_embeddings", None) or longest + args.output_len
    if longest + args.output_len > context:
        raise ConfigError(
            f"--output-len must be at most {max(0, context - longest)} with these prompts, not {args.output_len}."
        )
    return {
        "model": args.model,
        "max_model_len": min(context, longest + args.output_len + MAX_NUM_SPECULATIVE_TOKENS),
        "max_num_seqs": MAX_OPEN if args.rate else max(args.max_concurrency),
        **({"skip_tokenizer_init": True} if args.trace else {}),
        **({"load_format": args.load_format} if args.load_format else {}),
        "gpu_memory_utilization": round(MEMORY_SHARE / num_engines, 3),
        **({"dtype": args.dtype} if args.dtype else {}),
        **args.engine_args,
    }


@contextmanager
def engines_up(
    configs: Mapping[str, Config | None],
    arguments: Mapping[str, Any],
    advance: Callable[..., None],
    log: Forced | None = None,
) -> Iterator[tuple[dict[str, EngineProcess], Machine]]:
    """Starts all engines, one after another, and returns them and their machine. Raises ConfigError if one does not
    start."""
    with scratch() as folder, ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for number, (name, config) in enumerate(configs.items()):
            advance(f"{name}: starting vLLM")
            engine = serving_engine(name, arguments, config, folder / f"engine-{number}.log", log)
            engines[name] = stack.enter_context(engine)
            machine = engine.receive()
            advance()
        yield engines, machine
