"""The command `replay`: plays recorded traffic with every history proposer, and says what would serve it fastest."""

import argparse
import statistics
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.candidates import LADDER, Candidate, candidates
from vllm_specplugins.tools.replay.costs import H100, HOST_SOURCE, LOOKUP, NO_SPECULATION, CostTable, Load
from vllm_specplugins.tools.replay.data import Traffic, read_traffic
from vllm_specplugins.tools.replay.figures import Row, row_of
from vllm_specplugins.tools.replay.report import tell
from vllm_specplugins.tools.replay.simulate import Tokenize, simulate
from vllm_specplugins.tools.report import check_files


def run(args: argparse.Namespace) -> int:
    """The command; prints its report, and returns 0."""
    if (args.step_ms is None) != (args.token_ms is None):
        raise ConfigError("--step-ms and --token-ms must be given together, not one alone.")
    costs = H100 if args.step_ms is None else CostTable.line(args.step_ms, args.token_ms)
    found = candidates(args.methods, args.num_draft or LADDER)
    check_files(args)

    @cache
    def tokenizer() -> Any:
        if args.tokenizer is None:
            raise ConfigError("holds text: --tokenizer must name a model or its folder.")
        from vllm_specplugins.tools.base_model import load_tokenizer

        return load_tokenizer(args.tokenizer)

    def tokenize(text: str) -> list[int]:
        """What a proposer may ask for; without a tokenizer no text has tokens."""
        return list(tokenizer()(text, add_special_tokens=False)["input_ids"]) if args.tokenizer else []

    with progress() as bars:
        reading = bars.add_task("reading", total=None)
        traffic = read_traffic(args.data, tokenizer, args.requests, partial(bars.advance, reading))
        bars.remove_task(reading)
        rows = play(args, traffic, found, costs, tokenize, bars)
    conditions = {
        "requests": len(traffic.histories),
        "prompt_tokens": sum(traffic.prompt_lengths),
        "output_tokens": traffic.num_output_tokens,
        "costs": costs.source,
        "host": HOST_SOURCE if args.step_ms is None else None,
        "draft_us": args.draft_us,
        "most": max(args.num_draft) if args.num_draft else None,
    }
    played = {row.key for row in rows}
    tell(args, rows, [candidate for candidate in found if candidate.key in played], conditions)
    return 0


def play(
    args: argparse.Namespace,
    traffic: Traffic,
    found: Sequence[Candidate],
    costs: CostTable,
    tokenize: Tokenize,
    bars: Progress,
) -> list[Row]:
    """A row for each batch size and candidate, no speculation first; where the user names no K, as long as speed
    rises with it."""
    task = bars.add_task("no speculation", total=len(traffic.histories) * len(args.batch) * (1 + len(found)))
    advance = partial(bars.advance, task)

    def load(batch: int, host: CostTable, waits: bool) -> Load:
        return Load(costs, batch, args.draft_us, *((host, waits) if args.step_ms is None else ()))

    plain = {
        batch: simulate(traffic, None, 0, load(batch, NO_SPECULATION, False), advance=advance) for batch in args.batch
    }
    rows = [row_of(None, batch, totals, totals) for batch, totals in plain.items()]
    for (method, policy), sizes in groupby(found, lambda candidate: (candidate.method, candidate.policy)):
        gains: list[float] = []
        for candidate in sizes:
            if not args.num_draft and is_past(gains):
                advance(len(traffic.histories) * len(args.batch))
                continue
            if not gains:  # compilers and caches warm up
                simulate(traffic.first(1), candidate.build, candidate.num_draft, Load(costs), tokenize)
            host, own = NO_SPECULATION if candidate.waits else LOOKUP, list[Row]()
            for batch in args.batch:
                bars.update(task, description=f"{method}, {policy}, K = {candidate.num_draft}, {batch} at a time")
                its = load(batch, host, candidate.waits)
                totals = simulate(traffic, candidate.build, candidate.num_draft, its, tokenize, advance)
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
