"""What a replay says: a row for each method, policy, K and batch size; and which of them to serve with."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from vllm_specplugins.tools.bench.advice import LOSES, PAYS
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.rivals import Rival
from vllm_specplugins.tools.replay.simulate import Totals
from vllm_specplugins.tools.report import serve_with

BOOTSTRAPS, SOME_STEPS = 1000, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a candidate did.

    Args:
        batch: requests at a time.
        method: NONE for no speculation.
        tokens_per_step: of a request, its first token left out: acceptance length.
        coverage: share of steps that verified a draft.
        accepted: share of draft tokens that were accepted; None if there were none.
        ms_per_token: of the engine's time, for each token of any request.
        draft_us: of drafting, by request and step.
        speed_up: of tokens per ms, over no speculation.
        low, high: of it, had other requests like these come: 95 % of BOOTSTRAPS draws with return.
        num_faults: of the proposer.
        task: the file of the requests, where each is played for itself.
        along: tokens of a step by PLACE tokens of output, as far as there are SOME_STEPS steps.
        beside: of a gated method, by other method and K: its speed of that one's, and the range.
    """

    batch: int
    method: str
    policy: str
    num_draft: int
    tokens_per_step: float
    coverage: float
    accepted: float | None
    ms_per_token: float
    draft_us: float
    speed_up: float
    low: float
    high: float
    num_faults: int
    task: str = ""
    along: Sequence[float] = ()
    beside: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Which candidate it is of."""
        return self.method, self.policy, self.num_draft

    @property
    def title(self) -> str:
        """Its requests: their file, where there are several, and how many at a time."""
        return f"{self.task}{', ' if self.task else ''}{self.batch} at a time"

    @property
    def speed(self) -> str:
        """The speed-up and its range."""
        return f"{self.speed_up:.2f}x ({self.low:.2f}-{self.high:.2f})"


def row_of(candidate: Candidate | Rival | None, batch: int, totals: Totals, plain: Totals, **more: Any) -> Row:
    """The row of these totals; `plain` is no speculation's. `more`: other fields of the row."""
    steps = max(1, totals.steps)
    method, policy, num_draft = candidate.key if candidate else (NONE, ALWAYS, 0)
    speed_up = totals.tokens_per_ms / plain.tokens_per_ms if plain.emitted else 1.0
    low, high = speed_range(totals, plain) if plain.by_request else (speed_up, speed_up)
    return Row(
        batch=batch,
        method=method,
        policy=policy,
        num_draft=num_draft,
        tokens_per_step=totals.emitted / steps,
        coverage=totals.drafts / steps,
        accepted=totals.accepted / totals.drafted if totals.drafted else None,
        ms_per_token=totals.ms / max(1, totals.emitted),
        draft_us=1000 * totals.drafting_ms / steps,
        speed_up=speed_up,
        low=low,
        high=high,
        num_faults=totals.num_faults,
        along=along(totals),
        **more,
    )


def along(totals: Totals) -> list[float]:
    """See Row."""
    counts = [totals.along.get(place, (0, 0)) for place in range(max(totals.along, default=-1) + 1)]
    return [tokens / steps for tokens, steps in takewhile(lambda count: count[1] >= SOME_STEPS, counts)]


def compared(totals: Totals, others: Mapping[str, Totals]) -> dict[str, tuple[float, float, float]]:
    """See Row."""
    return {
        name: (totals.tokens_per_ms / other.tokens_per_ms, *speed_range(totals, other))
        for name, other in others.items()
    }


def speed_range(totals: Totals, plain: Totals) -> tuple[float, float]:
    """The speed-up's range over requests, of which both played the same."""
    numbers = sorted(plain.by_request)
    (own, own_ms), (its, its_ms) = (np.array([each.by_request[n] for n in numbers]).T for each in (totals, plain))
    drawn = np.random.default_rng(0).multinomial(len(numbers), [1 / len(numbers)] * len(numbers), BOOTSTRAPS)
    speeds = (drawn @ own) / (drawn @ own_ms) / ((drawn @ its) / (drawn @ its_ms))
    low, high = np.quantile(speeds, (0.025, 0.975))
    return float(low), float(high)


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each batch size, method and policy the row with the fastest K."""
    best: dict[tuple[str, int, str, str], Row] = {}
    for row in rows:
        key = row.task, row.batch, row.method, row.policy
        best[key] = max(best.get(key, row), row, key=lambda row: row.speed_up)
    return list(best.values())


def verdict(rows: Sequence[Row], found: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """What would serve it fastest, in words with the value for --speculative-config, and the candidate: the best
    geometric mean over the batch sizes. None where none pays."""
    played = {candidate.key: [row for row in rows if row.key == candidate.key] for candidate in found}
    gains = {key: statistics.geometric_mean(row.speed_up for row in own) for key, own in played.items()}
    best = max(found, key=lambda candidate: gains[candidate.key])
    gain, own = gains[best.key], played[best.key]
    if gain < PAYS:
        return f"Serve without speculation: the best method here is {gain:.2f} times as fast.", None
    gated = "" if best.policy == ALWAYS else " behind a gate"
    words = f"Predicted: {best.method}{gated}, K = {best.num_draft}, serves this {gain:.2f} times as fast as without"
    words += f" ({', '.join(f'{row.title}: {row.speed}' for row in own)})"
    if any(row.speed_up < LOSES for row in own):
        words += "; where it loses, go without"
    if all(row.low <= 1 for row in own):
        return f"{words}. No advice: the ranges do not tell it from no speculation.", best
    return f"{words}. Measure it with `bench` before you serve with it.\n{serve_with(best.config)}", best
