"""What follows from the figures, in sentences: which method to serve with, and what not to believe."""

import json
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence

from vllm_specplugins.tools.bench.figures import Row
from vllm_specplugins.tools.bench.methods import NONE, Config

PAYS = 1.03  # a gain that is worth a configuration
LOSES = 0.97
WIDE = 0.3  # of a range over its median; a quiet machine stays below 0.1


def advice(rows: Sequence[Row], configs: Mapping[str, Config | None]) -> str:
    """The method with the best geometric mean of its median ratios, where it wins and where it loses."""
    by_method = {name: [row for row in rows if row.method == name] for name in configs if name != NONE}
    gains = {name: statistics.geometric_mean(row.ratio.median for row in own) for name, own in by_method.items()}
    best = max(gains, key=lambda name: gains[name])
    if gains[best] < PAYS:
        return f"Serve without speculation: the best method here, {best}, is {gains[best]:.2f}x as fast."
    words = f"Serve with {best}: {gains[best]:.2f}x"
    if len(by_method[best]) > 1:
        ordered = sorted(by_method[best], key=lambda row: row.ratio.median)
        low, high = ordered[0], ordered[-1]
        words += f" in the mean, {low.ratio.median:.2f}x ({low.cell}) to {high.ratio.median:.2f}x ({high.cell})"
        if low.ratio.median < LOSES:
            words += _safer(by_method, low)
    if rivals := [name for name, own in by_method.items() if name != best and _overlap(by_method[best], own)]:
        words += f"; the ranges do not tell it from {' and '.join(rivals)}"
    return f"{words}.\n--speculative-config {shlex.quote(json.dumps(configs[best]))}"


def _overlap(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether two methods may be as fast as each other in all cells."""
    pairs = zip(rows, others, strict=True)
    return all(own.ratio.low <= other.ratio.high and other.ratio.low <= own.ratio.high for own, other in pairs)


def _safer(by_method: Mapping[str, Sequence[Row]], low: Row) -> str:
    """What to do if the best method loses somewhere."""
    safe = [name for name, own in by_method.items() if all(row.ratio.median >= LOSES for row in own)]
    if safe:
        return f"; if you serve such traffic, {safe[0]}, which loses nowhere here"
    return f"; where you serve such traffic ({low.cell}), go without"


def notes(rows: Sequence[Row], dtype: str) -> Iterator[str]:
    """What a reader should know before believing the figures."""
    if any(row.beats_its_steps for row in rows):
        yield from _cheap_steps(rows)
    if any(row.ratio.high - row.ratio.low > WIDE * row.ratio.median for row in rows):
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
    """Decoding that gained more than tokens per step: why."""
    for row in rows:
        if row.beats_its_steps:
            proven = row.step_cost.high < 1
            cause = (
                "in every round: the model does no less in them, so what is around it is cheaper, as sampling"
                if proven
                else "but not in every round: the machine was busy with something else, so do not believe it"
            )
            yield (
                f"{row.method} ({row.cell}) decodes {row.decoding.median:.2f}x as fast with {row.tokens_per_step:.2f} "
                f"tokens/step: its steps took {row.step_cost.median:.2f} times as long as without speculation, {cause}."
            )
