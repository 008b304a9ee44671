"""What follows from the figures, in sentences: which method to serve with, and what not to believe."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from vllm_specplugins.tools.bench.figures import Row, Spread
from vllm_specplugins.tools.picker import NONE, Config
from vllm_specplugins.tools.report import serve_with

PAYS = 1.03  # a gain that is worth a configuration
LOSES = 0.97
WIDE = 0.3  # of a range over its median; a quiet machine stays below 0.1
MIN_ROUNDS, MIN_REQUESTS = 3, 8  # of a workload: fewer say nothing


def advice(rows: Sequence[Row], configs: Mapping[str, Config | None]) -> str:
    """The fastest method, by the mean of all cells, and where it wins and loses; no value where that is not certain."""
    by_method, gains, best = _ranked(rows)
    words = f"{best}: {gains[best]}"
    if len(by_method[best]) > 1:
        ordered = sorted(by_method[best], key=lambda row: row.ratio.median)
        low, high = ordered[0], ordered[-1]
        words += f" in the mean, {low.ratio.median:.2f}x ({low.cell}) to {high.ratio.median:.2f}x ({high.cell})"
        if low.ratio.median < LOSES:
            words += _safer(by_method, low)
    if doubts := list(_doubts(rows, gains, best)):
        return f"No advice: {'; '.join(doubts)}. The highest median has {words}."
    if gains[best].median < PAYS:
        return f"Serve without speculation. The best method here is {words}."
    return f"Serve with {words}.\n{serve_with(configs[best] or {})}"


def chosen(rows: Sequence[Row], configs: Mapping[str, Config | None]) -> Config | None:
    """What `advice` would serve with; None if it would not speculate, or does not know."""
    _, gains, best = _ranked(rows)
    return configs[best] if gains[best].median >= PAYS and not any(_doubts(rows, gains, best)) else None


def _ranked(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], dict[str, Spread], str]:
    """The rows of each method, its gain, and the best method."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        if row.method != NONE:
            by_method.setdefault(row.method, []).append(row)
    gains = {name: _mean_ratio(own) for name, own in by_method.items()}
    return by_method, gains, max(gains, key=lambda name: gains[name].median)


def _mean_ratio(rows: Sequence[Row]) -> Spread:
    """Of a method: in each round the geometric mean over the cells."""
    return Spread.of([*map(statistics.geometric_mean, zip(*(row.ratio.rounds for row in rows), strict=True))])


def _doubts(rows: Sequence[Row], gains: Mapping[str, Spread], best: str) -> Iterator[str]:
    """Why the figures do not say which method is the fastest."""
    if (count := len(rows[0].ratio.rounds)) < MIN_ROUNDS:
        yield f"it takes {MIN_ROUNDS} rounds, not {count}"
    if (count := min(row.num_outputs for row in rows)) < MIN_REQUESTS:
        yield f"it takes {MIN_REQUESTS} requests of each workload, not {count}"
    if _is_busy(rows):
        yield "the ranges are wide, something else kept the machine busy"
    if any(row.beats_its_steps for row in rows):
        yield "a ratio is above tokens/step, for which there is no measured reason"
    others = {NONE: Spread(1.0, 1.0, 1.0), **gains}
    if rivals := [name for name, gain in others.items() if name != best and gain.overlaps(gains[best])]:
        shown = ", ".join(f"{name} {others[name]}" for name in rivals)
        yield f"the ranges overlap, so that {best} is not told from {shown}"


def _is_busy(rows: Sequence[Row]) -> bool:
    return any(row.ratio.high - row.ratio.low > WIDE * row.ratio.median for row in rows)


def _safer(by_method: Mapping[str, Sequence[Row]], low: Row) -> str:
    """What to do if the best method loses somewhere."""
    safe = [name for name, own in by_method.items() if all(row.ratio.median >= LOSES for row in own)]
    if safe:
        return f"; if you serve such traffic, {safe[0]}, which loses nowhere here"
    return f"; where you serve such traffic ({low.cell}), go without"


def notes(rows: Sequence[Row], dtype: str) -> Iterator[str]:
    """What a reader should know before believing the figures."""
    yield from _cheap_steps(rows)
    if _is_busy(rows):
        yield "Ranges are wide: something else kept the machine busy. Repeat when it is idle."
    looping = list(dict.fromkeys(str(row.cell) for row in rows if row.method == NONE and row.loops))
    if looping:
        yield (
            f"Loops: more than half of the output repeats itself ({'; '.join(looping)}), which flatters every lookup: "
            "expect less from text that does not."
        )
    if any(row.num_different for row in rows) and dtype != "float32":
        yield f"Outputs in {dtype} may differ: how sums are rounded depends on how many tokens a step verifies."
    if any(row.num_different is None for row in rows):
        yield "Sampled outputs are not compared; `verify-lossless` tests their distribution."
    for row in rows:
        if row.num_faults:
            yield f"{row.method} failed {row.num_faults} times ({row.cell}), which cost it drafts."


def _cheap_steps(rows: Sequence[Row]) -> Iterator[str]:
    """Decoding that gained more than tokens per step explain."""
    for row in rows:
        if row.beats_its_steps:
            yield (
                f"{row.method} ({row.cell}) decodes {row.decoding.median:.2f}x as fast with {row.tokens_per_step:.2f} "
                f"tokens/step: its steps took {row.step_cost} of one without speculation. On a CPU vLLM's linear "
                "layers take less for 3 to 6 tokens than for one (docs/figures.md); elsewhere nobody has measured why. "
                "This row gives no advice."
            )
