"""Shows the progress of long work on standard error: bars on a terminal, otherwise a line for each task every 30 s."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

SECONDS = 30.0  # between lines
MEMORY_SECONDS = 3600.0  # period of the speed estimate, since a task may advance only every few minutes


@contextmanager
def progress() -> Iterator[Progress]:
    """Yields bars to which a command adds its tasks; the description of a task has its latest figures."""
    console, ended = Console(stderr=True), Event()
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal,
                    speed_estimate_period=MEMORY_SECONDS)  # fmt: skip

    def print_lines() -> None:
        while not ended.wait(SECONDS):
            for line in [line_of(task) for task in bars.tasks if not task.finished] or ["working"]:
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    if bars.disable:
        Thread(target=print_lines, daemon=True).start()
    try:
        with bars:
            yield bars
    finally:
        ended.set()


def line_of(task: Task) -> str:
    left = task.time_remaining
    done = "" if task.total is None else f": {task.completed:.0f} of {task.total:.0f}"
    line = f"{task.description or 'working'}{done}, {task.elapsed or 0:.0f} s so far"
    return line if left is None else f"{line}, about {left:.0f} s left"
