"""Implements the command `replay`: plays recorded traffic with every proposer that reads only token ids, and recommends
one."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby
from typing import Any

from rich.progress import Progress

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.harness.text import services
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.progress import progress
from vllm_specplugins.tools.replay.candidates import GATED, LADDER, Candidate, beside, candidates, rivals
from vllm_specplugins.tools.replay.costs import H100, HOST_SOURCE, LOOKUP, NO_SPECULATION, CostTable, Load, costs_of
from vllm_specplugins.tools.replay.data import Chosen, Traffic, read_traffic
from vllm_specplugins.tools.replay.drafter import Drafter
from vllm_specplugins.tools.replay.report import Row, compare, row_of, tell
from vllm_specplugins.tools.replay.simulate import Totals, simulate
from vllm_specplugins.tools.report import check_json


def run(args: argparse.Namespace) -> int:
    costs = costs_of(args.costs)
    drafter = Drafter.parse(args.drafter) if args.drafter else None
    compared = candidates(args.methods, args.num_draft or LADDER, args.runner)
    compared += [beside(drafter, args.runner)] if drafter else []
    check_json(args)

    @cache
    def tokenizer() -> Any:
        if args.tokenizer is None:
            raise ConfigError("holds text: --tokenizer must name a model or its folder.")
        from vllm_specplugins.tools.base_model import load_tokenizer

        return load_tokenizer(args.tokenizer)

    def text_of(traffic: Traffic) -> Mapping[str, Any]:
        return services(tokenizer(), traffic.vocab_size) if args.tokenizer else {}

    with progress() as bars:
        reading = bars.add_task("reading", total=None)
        chosen = Chosen(args.requests, args.ids, args.max_output, drafter.name if drafter else None)
        files = {file.stem: [file] for file in args.dataset_path} if args.by_file else {"": args.dataset_path}
        advance = partial(bars.advance, reading)
        tasks = {task: read_traffic(paths, tokenizer, chosen, advance) for task, paths in files.items()}
        bars.remove_task(reading)
        rows = [
            replace(row, task=task)
            for task, traffic in tasks.items()
            for row in play(args, traffic, compared, costs, text_of(traffic), bars)
        ]
    conditions = {
        "requests": sum(len(traffic.histories) for traffic in tasks.values()),
        "prompt_tokens": sum(sum(traffic.prompt_lengths) for traffic in tasks.values()),
        "output_tokens": sum(traffic.num_output_tokens for traffic in tasks.values()),
        "runner": args.runner,
        "late": sorted({candidate.method for candidate in compared if candidate.is_late}),
        "costs": costs.source,
        "drafter": args.drafter,
        "host": HOST_SOURCE if costs is H100 else None,
        "draft_us": args.draft_us,
        "most": max(args.num_draft) if args.num_draft else None,
    }
    played = {row.key for row in rows}
    tell(args, rows, [candidate for candidate in compared if candidate.key in played], conditions)
    return 0


def play(
    args: argparse.Namespace,
    traffic: Traffic,
    compared: Sequence[Candidate],
    costs: CostTable,
    text: Mapping[str, Any],
    bars: Progress,
) -> list[Row]:
    """Yields a row for each batch size and candidate, no speculation first. Unless the user sets K, K rises while the
    speed rises."""
    batches = args.max_concurrency
    task = bars.add_task("no speculation", total=len(traffic.histories) * len(batches) * (1 + len(compared)))
    advance = partial(bars.advance, task)

    def load(batch: int, host: CostTable, waits: bool = False) -> Load:
        return Load(costs, batch, args.draft_us, *((host, waits) if costs is H100 else ()))

    plain = {batch: simulate(traffic, None, 0, load(batch, NO_SPECULATION), advance=advance) for batch in batches}
    rows = [row_of(None, batch, totals, totals) for batch, totals in plain.items()]
    drafter = next((candidate.drafter for candidate in compared if candidate.drafter), None)
    others = {
        batch: {rival: _played(traffic, rival, load(batch, LOOKUP)) for rival in rivals(drafter)} for batch in batches
    }
    rows += [row_of(rival, batch, its, plain[batch]) for batch in batches for rival, its in others[batch].items()]
    for (method, policy), sizes in groupby(compared, lambda candidate: (candidate.method, candidate.policy)):
        gains: list[float] = []
        for candidate in sizes:
            if not args.num_draft and is_past(gains):
                advance(len(traffic.histories) * len(batches))
                continue
            if not gains:  # compilers and caches warm up
                _played(traffic.first(1), candidate, Load(costs), text=text)
            host, new = NO_SPECULATION if candidate.waits else LOOKUP, list[Row]()
            for batch in batches:
                bars.update(task, description=f"{method}, {policy}, K = {candidate.num_draft}, {batch} at a time")
                its_load = load(batch, host, candidate.waits)
                totals = _played(traffic, candidate, its_load, text=text, advance=advance)
                named = {f"{rival.method}, K = {rival.num_draft}": its for rival, its in others[batch].items()}
                pairs = {NONE: plain[batch], **named} if policy == GATED else {}
                speeds = {name: compare(totals, other) for name, other in pairs.items()}
                new.append(row_of(candidate, batch, totals, plain[batch], beside=speeds))
            gains.append(statistics.geometric_mean(row.speed_up for row in new))
            rows += new
    return rows


def _played(traffic: Traffic, candidate: Candidate, load: Load, **more: Any) -> Totals:
    more |= {"drafter": candidate.drafter, "lengths": candidate.lengths}
    return simulate(traffic, candidate.build, candidate.num_draft, load, **more)


def is_past(gains: Sequence[float]) -> bool:
    """Returns whether neither of the last two values of K was faster than an earlier one.

    >>> is_past([1.5, 2.0, 1.9]), is_past([1.5, 2.0, 1.9, 1.8]), is_past([1.5, 2.0, 1.9, 2.1])
    (False, True, False)
    """
    return len(gains) > 2 and max(gains[-2:]) <= max(gains[:-2])
