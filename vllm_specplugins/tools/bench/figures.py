"""Computes the figures of a benchmark: medians and ranges over rounds. A ratio is tokens per second relative to no
speculation in the same round. For decoding alone, without the time to the first token of each request, ratio = tokens
per step / step cost, where no speculation has 1 for both."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from vllm_specplugins.engine.harness.traffic import Turn

NGRAM = 8  # tokens in a row that count as a repetition
LOOPS = 0.5  # share of repeated tokens above which an output is called a loop
SOME_STEPS = 3  # fewest steps with the same number of tokens: fewer may be outliers
WIDE = 0.3  # range of ratios, relative to the median, that suggests other load; without load it is below 0.1


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a figure over rounds."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    @property
    def is_wide(self) -> bool:
        return self.high - self.low > WIDE * self.median

    def interval(self, other: Self | None = None) -> tuple[float, float]:
        """Returns the 95 % interval of the geometric mean of the rounds; `other`, if given, divides them round by
        round. The logarithms follow Student's t distribution, with its quantile from the expansion of Cornish and
        Fisher in 1 / n."""
        divisors = other.rounds if other else (1.0,) * len(self.rounds)
        logs = np.log(self.rounds) - np.log(divisors)
        n = len(logs) - 1
        t = 1.96 + 2.372 / n + 2.823 / n**2 + 2.556 / n**3 + 1.589 / n**4
        half = t * logs.std(ddof=1) / math.sqrt(len(logs))
        return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Cell:
    """The traffic of a comparison. With a rate, requests arrive at random times; otherwise a request arrives when
    another request ends."""

    workload: str
    batch: int  # number of concurrent requests; with a rate, their limit
    temperature: float
    rate: float = 0.0  # rate, as a share of the rate of no speculation

    def __str__(self) -> str:
        load = f"rate {self.rate:g} of capacity" if self.rate else f"batch {self.batch}"
        return f"{self.workload}, {load}, T {self.temperature:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a method in a cell. Steps are counted per request, without the step of the first token."""

    cell: Cell
    method: str
    tokens_per_second: float  # median over the rounds, prompts included
    ratio: Spread  # of tokens per second to no speculation
    decoding: Spread  # the same ratio for decoding alone
    tokens_per_step: float  # acceptance length
    step_cost: Spread  # mean time of a step relative to no speculation
    step_ms: float  # median of that mean time over the rounds
    coverage: float  # share of steps with a draft
    accepted: float | None  # share of draft tokens; None without any
    first_ms: float  # median time to the first token
    gap_ms: tuple[float, float]  # between tokens of a request: median and 99th percentile
    repeats: float  # share of output tokens that end a repeated n-gram of the same output
    num_outputs: int
    num_different: int | None  # outputs that differ from no speculation, or from the log; None if sampled
    num_faults: int  # of our proposer
    clock: str = "wall"  # or "cpu": all times are CPU time of the engine's thread

    @property
    def loops(self) -> bool:
        return self.repeats > LOOPS


def rows_of(
    cell: Cell,
    turns: Mapping[str, Sequence[Turn]],
    has_cpu_clock: bool = False,
    log: Sequence[Sequence[int]] | None = None,
) -> list[Row]:
    """Returns the rows of a cell, from the turns of each method. No speculation comes first, and the first turn is a
    warm-up. With `has_cpu_clock` (the model runs in the engine's thread, on a CPU), the CPU time of that thread
    replaces wall time if other load makes a range wide. Outputs are compared with the `log` that engines had to emit,
    or with the outputs of no speculation."""
    plain = next(iter(turns.values()))
    for clock in ("wall", "cpu"):
        rows = [_row(cell, name, measured[1:], plain[1:], clock, log) for name, measured in turns.items()]
        if not (has_cpu_clock and any(row.ratio.is_wide for row in rows)):
            break
    return rows


def _row(cell: Cell, method: str, turns: Sequence[Turn], plain: Sequence[Turn], clock: str, log: Any) -> Row:
    def scale(turn: Turn) -> float:
        return turn.cpu_seconds / turn.seconds if clock == "cpu" else 1.0

    def against(figure: Callable[[Turn], float]) -> Spread:
        return Spread.of([figure(turn) / figure(other) for turn, other in zip(turns, plain, strict=True)])

    def total(name: str) -> int:
        return sum(getattr(turn, name) for turn in turns)

    answers = [answer for turn in turns for answer in turn.answers]
    outputs = [answer.token_ids for answer in answers]
    expected = [list(tokens) for tokens in log or ()] * len(turns)
    expected = expected or [answer.token_ids for turn in plain for answer in turn.answers]
    median_ms, p99_ms = np.quantile([ms for answer in answers for ms in answer.step_ms] or [0.0], (0.5, 0.99))
    num_steps, num_draft_tokens = total("num_steps"), total("num_draft_tokens")
    return Row(
        cell=cell,
        method=method,
        tokens_per_second=statistics.median(turn.tokens_per_second / scale(turn) for turn in turns),
        ratio=against(lambda turn: turn.tokens_per_second / scale(turn)),
        decoding=against(lambda turn: turn.tokens_per_step / turn.step_ms / scale(turn)),
        tokens_per_step=total("num_decoded") / num_steps if num_steps else 1.0,
        step_cost=against(lambda turn: turn.step_ms * scale(turn)),
        step_ms=statistics.median(turn.step_ms * scale(turn) for turn in turns),
        coverage=total("num_drafts") / max(1, num_steps),
        accepted=total("num_accepted_tokens") / num_draft_tokens if num_draft_tokens else None,
        first_ms=statistics.median(answer.first_ms for answer in answers),
        gap_ms=(float(median_ms), float(p99_ms)),
        repeats=repeated_share(outputs),
        num_outputs=len(outputs),
        num_different=None if cell.temperature else sum(map(list.__ne__, outputs, expected)),
        num_faults=total("num_faults"),
        clock=clock,
    )


def step_ms_by_tokens(turns: Iterable[Turn]) -> dict[int, float]:
    """Returns the median ms of an engine's steps by the number of verified tokens, for numbers with at least SOME_STEPS
    steps."""
    times = defaultdict(list)
    for turn in turns:
        for num_tokens, ms in turn.steps:
            times[num_tokens].append(ms)
    return {number: statistics.median(ms) for number, ms in sorted(times.items()) if len(ms) >= SOME_STEPS}


def repeated_share(outputs: Sequence[Sequence[int]], ngram: int = NGRAM) -> float:
    """Returns the share of tokens that end a repeated n-gram of the same output.

    >>> repeated_share([[1, 2, 3, 1, 2, 3]], ngram=2)
    0.3333333333333333
    """
    num_repeated = 0
    for output in outputs:
        grams = [tuple(output[end - ngram : end]) for end in range(ngram, len(output) + 1)]
        num_repeated += len(grams) - len(set(grams))
    return num_repeated / max(1, sum(map(len, outputs)))
