"""The command `replay`: plays recorded traffic with every history proposer, and says what would serve it fastest."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.candidates import LADDER, Candidate, candidates
from vllm_specplugins.tools.replay.costs import HOST_SOURCE, NO_SPECULATION_US, TABLES, CostTable, HostCost
from vllm_specplugins.tools.replay.data import Traffic, read_traffic
from vllm_specplugins.tools.replay.figures import Row, row_of
from vllm_specplugins.tools.replay.report import Report, facts, panels, show
from vllm_specplugins.tools.replay.simulate import Load, simulate
from vllm_specplugins.tools.report import check_files, plot, stdout, write_json


def run(args: argparse.Namespace) -> int:
    """The command; prints its report, and returns 0."""
    found, costs = candidates(args.methods, args.num_draft or LADDER), pick_costs(args)
    check_files(args)
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
        "host": HOST_SOURCE if args.step_ms is None else None,
        "draft_us": args.draft_us,
        "most": None if args.num_draft is None else max(args.num_draft),
    }
    played = {row.key for row in rows}
    report = Report(rows, [candidate for candidate in found if candidate.key in played], conditions)
    show(report, stdout())
    if args.json:
        write_json(facts(report), args.json)
    if args.plot:
        plot(args.plot, f"{len(traffic.histories)} recorded requests, predicted", panels(rows))
    return 0


def play(
    args: argparse.Namespace,
    traffic: Traffic,
    found: list[Candidate],
    costs: CostTable,
    tokenize: Callable[[str], list[int]],
    bars: Progress,
) -> list[Row]:
    """A row for each batch size and candidate, no speculation first; where the user names no K, as long as speed
    rises with it."""
    task = bars.add_task("no speculation", total=len(traffic.histories) * len(args.batch) * (1 + len(found)))
    advance = partial(bars.advance, task)

    def load(batch: int, host: HostCost) -> Load:
        return Load(costs, batch, args.draft_us, host if args.step_ms is None else None)

    unaided = HostCost(NO_SPECULATION_US)
    plain = {batch: simulate(traffic, None, 0, load(batch, unaided), advance=advance) for batch in args.batch}
    rows = [row_of(None, batch, totals, totals) for batch, totals in plain.items()]
    for (method, policy), sizes in groupby(found, lambda candidate: (candidate.method, candidate.policy)):
        gains: list[float] = []
        for candidate in sizes:
            if args.num_draft is None and is_past(gains):
                advance(len(traffic.histories) * len(args.batch))
                continue
            build = partial(build_proposer, parse_config(candidate.config))
            if not gains:  # compilers and caches warm up
                simulate(traffic.first(1), build, candidate.num_draft, Load(costs), tokenize)
            own = []
            for batch in args.batch:
                words = f"{method}, {policy}, K = {candidate.num_draft}, {batch} at a time"
                bars.update(task, description=words)
                its = load(batch, candidate.host)
                totals = simulate(traffic, build, candidate.num_draft, its, tokenize, advance)
                own.append(row_of(candidate, batch, totals, plain[batch]))
            gains.append(statistics.geometric_mean(row.speed_up for row in own))
            rows += own
    return rows


def is_past(gains: Sequence[float]) -> bool:
    """Whether the last two K were not faster than one before them.

    >>> is_past([1.5, 2.0, 1.9]), is_past([1.5, 2.0, 1.9, 1.8]), is_past([1.5, 2.0, 1.9, 2.1])
    (False, True, False)
    """
    return len(gains) > 2 and max(gains[-2:]) <= max(gains[:-2])


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
