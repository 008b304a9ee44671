"""How far long work is, on standard error: bars on a terminal, and elsewhere a line for each task every 30 s."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    bars = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=MEMORY_SECONDS,
    )
    ended = Event()
    speaker = Thread(target=_speak, args=(bars, ended), daemon=True)
    if bars.disable:
        speaker.start()
    try:
        with bars:
            yield bars
    finally:
        ended.set()


def _speak(bars: Progress, ended: Event) -> None:
    passed = 0.0
    while not ended.wait(SECONDS):
        passed += SECONDS
        lines = [line_of(task) for task in bars.tasks if not task.finished]
        for line in lines or [f"working, {clock(passed)} so far"]:
            bars.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(task: Task) -> str:
    """What a task does, how far it is, and how long it will take."""
    done = f"{task.completed:.0f} of {task.total:.0f}, " if task.total else ""
    words = f"{task.description}: {done}{clock(task.elapsed or 0)} so far"
    return words + (f", about {clock(left)} left" if (left := _left(task)) else "")


def _left(task: Task) -> float | None:
    """Seconds; None where nothing tells."""
    if task.time_remaining is None and task.total and task.completed:
        return (task.elapsed or 0) * (task.total / task.completed - 1)
    return task.time_remaining


def clock(seconds: float) -> str:
    """A time in words.

    >>> clock(42.4), clock(190), clock(7260)
    ('42 s', '3 min 10 s', '2 h 1 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
