"""What follows from the figures, in sentences: which method to serve with, and what not to believe."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from vllm_specplugins.tools.bench.figures import Row, Spread
from vllm_specplugins.tools.picker import NONE, Config
from vllm_specplugins.tools.report import serve_with

PAYS = 1.03  # a gain that is worth a configuration
LOSES = 0.97
MIN_ROUNDS, MIN_REQUESTS = 3, 8  # of a workload: fewer say nothing


def verdict(rows: Sequence[Row], configs: Mapping[str, Config | None]) -> tuple[str, Config | None]:
    """The method to serve with, in words, and its configuration: None where that is no speculation, or not certain.

    Rounds are pairs: all methods serve the same prompts in turns. A method is recommended where the 95 % interval of
    its ratio to no speculation is above 1, and its median pays.

    Args:
        rows: of all methods.
        configs: of these, no speculation first.
    """
    by_method = {name: [row for row in rows if row.method == name] for name in configs}
    gains = {name: mean_ratio(own) for name, own in by_method.items()}
    best = max(list(gains)[1:], key=lambda name: gains[name].median)
    words = f"{best}: {gains[best]}"
    if len(own := by_method[best]) > 1:
        low, high = (end(own, key=lambda row: row.ratio.median) for end in (min, max))
        words += f" in the mean, {low.ratio.median:.2f}x ({low.cell}) to {high.ratio.median:.2f}x ({high.cell})"
        if low.ratio.median < LOSES:
            words += f"; where you serve such traffic ({low.cell}), go without"
    if doubts := list(_doubts(rows)):
        return f"No advice: {'; '.join(doubts)}. The highest median has {words}.", None
    low_end, high_end = gains[best].interval()
    if high_end <= 1 or gains[best].median < PAYS:
        return f"Serve without speculation. The best method here is {words}.", None
    if low_end <= 1:
        return (
            f"No advice: the interval of the best method, {low_end:.2f} to {high_end:.2f} times as fast as no "
            f"speculation, holds 1; more rounds narrow it. The highest median has {words}."
        ), None
    rivals = [name for name in list(gains)[1:] if name != best and gains[best].interval(gains[name])[0] <= 1]
    equal = f" ({', '.join(rivals)} may be as fast)" if rivals else ""
    return f"Serve with {words}{equal}.\n{serve_with(configs[best] or {})}", configs[best]


def mean_ratio(rows: Sequence[Row]) -> Spread:
    """The ratios of a method, in each round the geometric mean over the cells."""
    return Spread.of([*map(statistics.geometric_mean, zip(*(row.ratio.rounds for row in rows), strict=True))])


def _doubts(rows: Sequence[Row]) -> Iterator[str]:
    """Reasons why the figures say nothing."""
    if (count := len(rows[0].ratio.rounds)) < MIN_ROUNDS:
        yield f"it takes {MIN_ROUNDS} rounds, not {count}"
    if (count := min(row.num_outputs for row in rows)) < MIN_REQUESTS:
        yield f"it takes {MIN_REQUESTS} requests of each workload, not {count}"


def notes(rows: Sequence[Row], dtype: str) -> Iterator[str]:
    """What a reader should know before believing the figures."""
    for row in rows:
        if row.beats_its_steps:
            yield (
                f"{row.method} ({row.cell}) decodes {row.decoding.median:.2f}x as fast with {row.tokens_per_step:.2f} "
                f"tokens/step: its steps took {row.step_cost} of one without speculation, as on some CPUs "
                "(docs/figures.md)."
            )
        if row.num_faults:
            yield f"{row.method} failed {row.num_faults} times ({row.cell}), which cost it drafts."
    if wide := [str(row.cell) for row in rows if row.ratio.is_wide]:
        cause = "rounds have prompts of their own, and other work may have kept the machine busy"
        yield f"Ranges are wide ({'; '.join(dict.fromkeys(wide))}): {cause}."
    if timed := [str(row.cell) for row in rows if row.method == NONE and row.clock == "cpu"]:
        yield f"Times are CPU time of the engine's thread, for wall time was noisy ({'; '.join(timed)})."
    if looping := [str(row.cell) for row in rows if row.method == NONE and row.loops]:
        yield (
            f"Loops: more than half of the output repeats itself ({'; '.join(looping)}), which flatters every lookup: "
            "expect less from text that does not."
        )
    if any(row.num_different for row in rows) and dtype != "float32":
        yield f"Outputs in {dtype} may differ: how sums are rounded depends on how many tokens a step verifies."
    if any(row.num_different is None for row in rows):
        yield "Sampled outputs are not compared; `verify-lossless` tests their distribution."
