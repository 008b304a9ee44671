"""What a replay says: a row for each method, policy, K and batch size; and which of them to serve with."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.tools.bench.advice import LOSES, PAYS
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.simulate import Totals
from vllm_specplugins.tools.report import serve_with

BOOTSTRAPS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a candidate did.

    Args:
        batch: requests at a time.
        method: NONE for no speculation.
        tokens_per_step: of a request, its first token left out: acceptance length.
        coverage: share of steps that verified a draft.
        accepted: share of draft tokens that were right; None if there were none.
        ms_per_token: of the engine's time, for each token of any request.
        draft_us: of drafting, by request and step.
        speed_up: of tokens per ms, over no speculation.
        low, high: of it, had other requests like these come: 5th and 95th percentile of BOOTSTRAPS draws with return.
        num_faults: of the proposer.
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

    @property
    def key(self) -> tuple[str, str, int]:
        """Which candidate it is of."""
        return self.method, self.policy, self.num_draft


def row_of(candidate: Candidate | None, batch: int, totals: Totals, plain: Totals) -> Row:
    """The row of what was played; `plain` is no speculation's."""
    steps = max(1, totals.steps)
    speed_up = totals.tokens_per_ms / plain.tokens_per_ms if plain.emitted else 1.0
    low, high = speed_range(totals, plain) or (speed_up, speed_up)
    return Row(
        batch=batch,
        method=candidate.method if candidate else NONE,
        policy=candidate.policy if candidate else ALWAYS,
        num_draft=candidate.num_draft if candidate else 0,
        tokens_per_step=totals.emitted / steps,
        coverage=totals.drafts / steps,
        accepted=totals.accepted / totals.drafted if totals.drafted else None,
        ms_per_token=totals.ms / max(1, totals.emitted),
        draft_us=1000 * totals.drafting_ms / steps,
        speed_up=speed_up,
        low=low,
        high=high,
        num_faults=sum(totals.faults.values()),
    )


def speed_range(totals: Totals, plain: Totals) -> tuple[float, float] | None:
    """The speed-up's range over requests, of which both played the same; None where there are none."""
    numbers = sorted(plain.by_request)
    if not numbers:
        return None
    (own, own_ms), (its, its_ms) = (
        np.array([each.by_request[number] for number in numbers], np.float64).T for each in (totals, plain)
    )
    drawn = np.random.default_rng(0).multinomial(len(numbers), [1 / len(numbers)] * len(numbers), BOOTSTRAPS)
    speeds = (drawn @ own) / (drawn @ own_ms) / ((drawn @ its) / (drawn @ its_ms))
    low, high = np.quantile(speeds, (0.05, 0.95))
    return float(low), float(high)


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each batch size, method and policy the row with the fastest K."""
    best: dict[tuple[int, str, str], Row] = {}
    for row in rows:
        key = row.batch, row.method, row.policy
        if key not in best or row.speed_up > best[key].speed_up:
            best[key] = row
    return list(best.values())


def choose(rows: Sequence[Row], found: Sequence[Candidate]) -> tuple[Candidate | None, float]:
    """The candidate with the best geometric mean over the batch sizes, and that; None where none pays."""
    gains = {}
    for candidate in found:
        own = [row.speed_up for row in rows if row.key == candidate.key]
        gains[candidate.key] = statistics.geometric_mean(own)
    best = max(found, key=lambda candidate: gains[candidate.key])
    gain = gains[best.key]
    return (best if gain >= PAYS else None), gain


def advice(rows: Sequence[Row], found: Sequence[Candidate]) -> str:
    """What would serve it fastest, in a sentence, and the value for --speculative-config."""
    best, gain = choose(rows, found)
    if best is None:
        return f"Serve without speculation: the best method here is {gain:.2f} times as fast."
    own = [row for row in rows if row.key == best.key]
    behind = "" if best.policy == ALWAYS else " behind a gate"
    words = f"Predicted: {best.method}{behind}, K = {best.num_draft}, serves this {gain:.2f} times as fast as without"
    words += f" ({', '.join(f'{row.batch} at a time: {range_of(row)}' for row in own)})"
    if any(row.speed_up < LOSES for row in own):
        words += "; where it loses, go without"
    if all(row.low <= 1 for row in own):
        return f"{words}. No advice: the ranges do not tell it from no speculation."
    return f"{words}. Measure it with `bench` before you serve with it.\n{serve_with(best.config)}"


def range_of(row: Row) -> str:
    """The speed-up and its range."""
    return f"{row.speed_up:.2f}x ({row.low:.2f}-{row.high:.2f})"
