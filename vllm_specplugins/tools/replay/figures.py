"""What a replay says: a row for each method, policy, K and batch size; and which of them to serve with."""

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_specplugins.tools.bench.advice import LOSES, PAYS
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.simulate import Totals


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
    num_faults: int


def row_of(candidate: Candidate | None, batch: int, totals: Totals, plain: Totals) -> Row:
    """The row of what was played; `plain` is no speculation's."""
    steps = max(1, totals.steps)
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
        speed_up=totals.tokens_per_ms / plain.tokens_per_ms if plain.emitted else 1.0,
        num_faults=sum(totals.faults.values()),
    )


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
    gains = {_key(candidate): 1.0 for candidate in found}
    for key in gains:
        gains[key] = statistics.geometric_mean(
            row.speed_up for row in rows if (row.method, row.policy, row.num_draft) == key
        )
    best = max(found, key=lambda candidate: gains[_key(candidate)])
    gain = gains[_key(best)]
    return (best if gain >= PAYS else None), gain


def _key(candidate: Candidate) -> tuple[str, str, int]:
    return candidate.method, candidate.policy, candidate.num_draft


def advice(rows: Sequence[Row], found: Sequence[Candidate]) -> str:
    """What to serve with, in a sentence, and the value for --speculative-config."""
    best, gain = choose(rows, found)
    if best is None:
        return f"Serve without speculation: the best method here is {gain:.2f} times as fast."
    own = {row.batch: row.speed_up for row in rows if (row.method, row.policy, row.num_draft) == _key(best)}
    behind = "" if best.policy == ALWAYS else " behind a gate"
    words = f"Serve with {best.method}{behind}, K = {best.num_draft}: {gain:.2f} times as fast as without"
    if len(own) > 1:
        words += f" ({_by_batch(own)})"
    if min(own.values()) < LOSES:
        words += "; where it loses, go without"
    return f"{words}.\n--speculative-config {shlex.quote(json.dumps(best.config))}"


def _by_batch(speed_ups: Mapping[int, float]) -> str:
    return ", ".join(f"batch {batch}: {speed_up:.2f}" for batch, speed_up in speed_ups.items())
