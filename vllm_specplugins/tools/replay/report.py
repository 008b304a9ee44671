"""Writes the report of a replay: rows of figures, a table and JSON, and the recommended method."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from vllm_specplugins.tools.bench.report import LOSES, PAYS
from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.candidates import ALWAYS, Candidate
from vllm_specplugins.tools.replay.simulate import Totals
from vllm_specplugins.tools.report import say, serve_with, show_table, versions, write_json

BOOTSTRAPS = 1000
FEW_REQUESTS = 200  # fewer say little about other traffic
COLUMNS = ("K", "tok/step", "drafted", "accepted", "draft, us", "ms/token", "predicted")
LEGEND = (
    "K: the fastest value tried. tok/step: mean tokens of a request's step, without its first token (acceptance "
    "length). drafted: share of steps with a draft. accepted: share of draft tokens that the target accepts. draft: "
    "drafting time per request and step, if the device waits for it. ms/token: time of the engine per token of any "
    "request. predicted: the speed-up over no speculation, with its 95 % range for similar requests. gated: a gate "
    "drafts only what pays off; fixed: each step drafts K tokens."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of a candidate. A step is that of one request, after the step of its first token."""

    batch: int  # requests at a time
    method: str  # or NONE
    policy: str
    num_draft: int  # K
    tokens_per_step: float  # acceptance length
    coverage: float  # share of steps that verified a draft
    accepted: float | None  # share of draft tokens; None without any
    ms_per_token: float  # ms of the engine for each token of any request
    draft_us: float  # us of drafting per request and step
    speed_up: float  # tokens per ms relative to no speculation
    low: float  # the speed-up's 95 % range for similar requests
    high: float
    num_faults: int
    task: str = ""  # the file of the requests, if files are played separately
    # For a gated method, by other method and K: its relative speed, and the range.
    beside: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.policy, self.num_draft

    @property
    def title(self) -> str:
        return f"{self.task}{', ' if self.task else ''}{self.batch} at a time"

    @property
    def name(self) -> str:
        return self.method if self.policy == ALWAYS else f"{self.method}, {self.policy}"

    @property
    def speed(self) -> str:
        return f"{self.speed_up:.2f}x ({self.low:.2f}-{self.high:.2f})"


def row_of(candidate: Candidate | None, batch: int, totals: Totals, plain: Totals, **more: Any) -> Row:
    """Returns the row of these totals. `plain` is the row of no speculation, and `more` has further fields."""
    steps = max(1, totals.steps)
    method, policy, num_draft = candidate.key if candidate else (NONE, ALWAYS, 0)
    speed_up, low, high = compare(totals, plain)
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
        **more,
    )


def compare(totals: Totals, other: Totals) -> tuple[float, float, float]:
    """Returns the speed relative to another candidate, and its range over the requests of both."""
    speed_up = totals.tokens_per_ms / other.tokens_per_ms if other.emitted else 1.0
    if not (numbers := sorted(other.by_request)):
        return speed_up, speed_up, speed_up
    (tokens, ms), (its_tokens, its_ms) = (np.array([of.by_request[n] for n in numbers]).T for of in (totals, other))
    drawn = np.random.default_rng(0).multinomial(len(numbers), [1 / len(numbers)] * len(numbers), BOOTSTRAPS)
    speeds = (drawn @ tokens) / (drawn @ ms) / ((drawn @ its_tokens) / (drawn @ its_ms))
    low, high = np.quantile(speeds, (0.025, 0.975))
    return speed_up, float(low), float(high)


def best_rows(rows: Sequence[Row]) -> list[Row]:
    """Returns the row with the fastest K for each file, batch size, method and policy."""
    best: dict[tuple[str, int, str, str], Row] = {}
    for row in rows:
        key = row.task, row.batch, row.method, row.policy
        best[key] = max(best.get(key, row), row, key=lambda row: row.speed_up)
    return list(best.values())


def verdict(rows: Sequence[Row], played: Sequence[Candidate]) -> tuple[str, Candidate | None]:
    """Returns advice in words, with the value for --speculative-config, and the candidate with the best geometric mean
    over the batch sizes; None if none pays off."""
    by_key = {candidate.key: [row for row in rows if row.key == candidate.key] for candidate in played}
    gains = {key: statistics.geometric_mean(row.speed_up for row in its) for key, its in by_key.items()}
    best = max(played, key=lambda candidate: gains[candidate.key])
    gain, cells = gains[best.key], by_key[best.key]
    if gain < PAYS:
        return f"Serve without speculation: the best method here is {gain:.2f} times as fast.", None
    gated = "" if best.policy == ALWAYS else " behind a gate"
    words = f"Predicted: {best.method}{gated}, K = {best.num_draft}, serves this {gain:.2f} times as fast as without"
    words += f" ({', '.join(f'{row.title}: {row.speed}' for row in cells)})"
    if any(row.speed_up < LOSES for row in cells):
        words += "; where it loses, serve without speculation"
    if all(row.low <= 1 for row in cells):
        return f"{words}. No advice: the ranges include the speed of no speculation.", best
    return f"{words}. Measure it with `bench` before you serve with it.\n{serve_with(best.config or {})}", best


def tell(args: argparse.Namespace, rows: list[Row], played: Sequence[Candidate], conditions: dict[str, Any]) -> None:
    """Prints the best K of each method, prints the advice, and writes all rows."""
    advice, best = verdict(rows, played)
    shown, notes = best_rows(rows), _notes(rows, best, conditions)
    titles = dict.fromkeys(row.title for row in rows)
    show_table(COLUMNS, {title: [_figures(row) for row in shown if row.title == title] for title in titles})
    for words in (LEGEND, *notes, f"\n{advice}"):
        say(words)
    facts = {
        **conditions,
        "versions": versions(),
        "rows": [asdict(row) for row in rows],
        "candidates": [candidate.facts for candidate in played],
        "notes": notes,
        "advice": advice,
    }
    write_json(args.output_json, facts)


def _figures(row: Row) -> list[str]:
    if row.method == NONE:
        return [NONE, "", "1.00", "", "", "", f"{row.ms_per_token:.2f}", "1.00x"]
    accepted = "" if row.accepted is None else f"{row.accepted:.0%}"
    shares = f"{row.tokens_per_step:.2f}", f"{row.coverage:.0%}", accepted
    return [row.name, str(row.num_draft), *shares, f"{row.draft_us:.1f}", f"{row.ms_per_token:.2f}", row.speed]


def _notes(rows: Sequence[Row], best: Candidate | None, done: Mapping[str, Any]) -> list[str]:
    host = f"; {done['host']}" if done["host"] else ""
    words = [
        f"{done['requests']} requests with {done['output_tokens']} tokens of output after {done['prompt_tokens']} of "
        f"prompts, on Model Runner {done['runner'].upper()}. A step's cost: {done['costs']}{host}."
    ]
    if done["requests"] < FEW_REQUESTS:
        words.append(f"{done['requests']} requests say little about other traffic: replay {FEW_REQUESTS} or more.")
    words += [f"{method} is simulated as on V1; on V2 its drafts are one or two steps late." for method in done["late"]]
    if best is not None and best.num_draft == done["most"]:
        words.append("The largest K tried is the best: try larger values, or leave --num-draft out.")
    faulty = dict.fromkeys(row.method for row in rows if row.num_faults)
    return words + [f"{method} lost drafts by faults; `check` shows their cause." for method in faulty]
