"""How far long work is, on standard error: bars on a terminal, and elsewhere a line for each task every 30 s."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn

SECONDS = 30.0  # between lines
MEMORY_SECONDS = 3600.0  # by which the speed is estimated: a task's step may take minutes


@contextmanager
def progress() -> Iterator[Progress]:
    """Where work adds its tasks; a task's description says what it does, and its figures so far."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal,
                    speed_estimate_period=MEMORY_SECONDS)  # fmt: skip
    ended = Event()
    if bars.disable:
        Thread(target=_speak, args=(bars, ended), daemon=True).start()
    try:
        with bars:
            yield bars
    finally:
        ended.set()


def _speak(bars: Progress, ended: Event) -> None:
    start = time.monotonic()
    while not ended.wait(SECONDS):
        lines = [line_of(task) for task in bars.tasks if not task.finished]
        for line in lines or [f"working, {clock(time.monotonic() - start)} so far"]:
            bars.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(task: Task) -> str:
    """What a task does, how far it is, and how long it will take."""
    done, elapsed, left = "", task.elapsed or 0.0, task.time_remaining
    if task.total:
        done = f"{task.completed:.0f} of {task.total:.0f}, "
        if left is None and task.completed:
            left = elapsed * (task.total / task.completed - 1)
    return f"{task.description}: {done}{clock(elapsed)} so far{f', about {clock(left)} left' if left else ''}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(42.4), clock(7265)
    ('0:00:42', '2:01:05')
    """
    return str(timedelta(seconds=round(seconds)))
