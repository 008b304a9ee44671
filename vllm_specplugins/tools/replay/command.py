"""The command `replay`: plays recorded traffic with every history proposer, and says what would serve it fastest."""

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.candidates import Candidate, candidates
from vllm_specplugins.tools.replay.costs import TABLES, CostTable
from vllm_specplugins.tools.replay.data import Traffic, read_traffic
from vllm_specplugins.tools.replay.figures import Row, row_of
from vllm_specplugins.tools.replay.report import Report, plot, show, write
from vllm_specplugins.tools.replay.simulate import Load, simulate


def run(args: argparse.Namespace) -> int:
    """The command; prints its report, and returns 0."""
    found, costs = candidates(args.methods, args.num_draft), pick_costs(args)
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path and not path.parent.is_dir():
            raise ConfigError(f"{option} must be a file in a folder that is there, not {path}.")
    with progress() as bars:
        reading = bars.add_task("reading", total=None)
        load_tokenizer = cache(partial(_load_tokenizer, args.tokenizer))
        traffic = read_traffic(args.data, load_tokenizer, args.requests, partial(bars.advance, reading))
        bars.remove_task(reading)
        rows = play(args, traffic, found, costs, _tokenize(args, load_tokenizer), bars)
    conditions = {
        "requests": len(traffic.histories),
        "prompt_tokens": sum(traffic.prompt_lengths),
        "output_tokens": traffic.num_output_tokens,
        "costs": costs.source,
        "draft_us": args.draft_us,
    }
    report = Report(rows, found, conditions)
    show(report, Console())
    if args.json:
        write(report, args.json)
    if args.plot:
        plot(rows, f"{len(traffic.histories)} recorded requests", args.plot)
    return 0


def play(
    args: argparse.Namespace,
    traffic: Traffic,
    found: list[Candidate],
    costs: CostTable,
    tokenize: Callable[[str], list[int]],
    bars: Progress,
) -> list[Row]:
    """A row for each batch size and candidate, no speculation first."""
    rows = []
    task = bars.add_task("no speculation", total=len(traffic.histories) * len(args.batch) * (1 + len(found)))
    builds = [partial(build_proposer, parse_config(candidate.config)) for candidate in found]
    for candidate, build in zip(found, builds, strict=True):  # compilers and caches warm up
        simulate(traffic.first(1), build, candidate.num_draft, Load(costs), tokenize)
    for batch in args.batch:
        load = Load(costs, batch, args.draft_us)
        plain = simulate(traffic, None, 0, load, advance=partial(bars.advance, task))
        rows.append(row_of(None, batch, plain, plain))
        for candidate, build in zip(found, builds, strict=True):
            words = f"{candidate.method}, {candidate.policy}, K = {candidate.num_draft}, {batch} at a time"
            bars.update(task, description=words)
            totals = simulate(traffic, build, candidate.num_draft, load, tokenize, partial(bars.advance, task))
            rows.append(row_of(candidate, batch, totals, plain))
    return rows


def pick_costs(args: argparse.Namespace) -> CostTable:
    """The user's own step, or a table that others measured.

    Raises:
        ConfigError: half of a step.
    """
    if args.step_ms is None and args.token_ms is None:
        return TABLES[args.gpu]
    if args.step_ms is None or args.token_ms is None:
        raise ConfigError("--step-ms and --token-ms must be given together, not one alone.")
    return CostTable.line(args.step_ms, args.token_ms)


def _load_tokenizer(model: str | None) -> Any:
    """Raises ConfigError where there is none."""
    if model is None:
        raise ConfigError("holds text: --tokenizer must name a model or its folder.")
    from vllm_specplugins.tools.base_model import load_tokenizer

    return load_tokenizer(model)


def _tokenize(args: argparse.Namespace, load_tokenizer: Callable[[], Any]) -> Callable[[str], list[int]]:
    """What a proposer may ask for; without a tokenizer no text has tokens."""
    if args.tokenizer is None:
        return lambda text: []
    return lambda text: list(load_tokenizer()(text, add_special_tokens=False)["input_ids"])
