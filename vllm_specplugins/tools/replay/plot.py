"""The picture of a replay: speed by task and method, speed by number of requests, tokens of a step along an output."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from vllm_specplugins.tools.picker import NONE
from vllm_specplugins.tools.replay.figures import Row, best_rows
from vllm_specplugins.tools.replay.simulate import PLACE
from vllm_specplugins.tools.report import writing


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draws the best K of each method as PNG.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    rows = [row for row in best_rows(rows) if row.method != NONE]
    figure = Figure(figsize=(15, 5), layout="constrained")
    figure.suptitle(title, fontsize=11, wrap=True)
    by_task, by_batch, along = figure.subplots(1, 3)
    names, first = list(dict.fromkeys(f"{row.method}, {row.policy}" for row in rows)), rows[0].batch
    tasks, batches = (
        list(dict.fromkeys(values)) for values in zip(*((row.task, row.batch) for row in rows), strict=True)
    )
    for number, name in enumerate(names):
        own, style = [row for row in rows if f"{row.method}, {row.policy}" == name], {"color": f"C{number}"}
        for row in own:
            at = tasks.index(row.task) + (number - len(names) / 2) * 0.7 / len(names)
            if row.batch == first:
                by_task.vlines(at, row.low, row.high, **style)
                by_task.plot(at, row.speed_up, "o", **style)
        means = [statistics.geometric_mean(row.speed_up for row in own if row.batch == batch) for batch in batches]
        by_batch.plot(range(len(batches)), means, "o-", label=name, **style)
        shown = next(row for row in own if row.batch == first and row.task == tasks[0])
        along.plot([PLACE * place for place in range(len(shown.along))], shown.along, **style)
    for axes, words in (
        (by_task, f"speed-up, {first} at a time"),
        (by_batch, "speed-up by requests at a time"),
        (along, f"tokens/step by tokens of output{tasks[0] and ': '}{tasks[0]}, {first} at a time"),
    ):
        axes.axhline(1, color="0.4", lw=1, ls="--")
        axes.set_title(words, fontsize=10)
    by_task.set_xticks(range(len(tasks)), tasks)
    by_batch.set_xticks(range(len(batches)), batches)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    with writing("--plot", "PNG file", path):
        figure.savefig(path, dpi=100)
