"""Tokenizes queued texts in one thread, piece by piece and short texts first, so a long text delays a short text by at
most one piece. A text that has waited for a time proportional to its length precedes shorter ones."""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Work = Generator[None, None, T]

PIECE = 4096  # characters, about 20 ms
SECONDS_PER_CHARACTER = 2e-5  # wait after which a text precedes shorter ones: four times its tokenization
SEARCHED = 500  # characters in which a space to cut at is searched


def pieces(text: str) -> Iterator[str]:
    """Splits a text before spaces, if it has any, so that the pieces have the same tokens as the whole text."""
    start = 0
    while len(text) - start > PIECE + 1:  # one more character shows whether a word begins
        end = start + PIECE
        end = next((place for place in range(end, end - SEARCHED, -1) if _begins_word(text, place)), end)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _begins_word(text: str, place: int) -> bool:
    """Returns whether a token ends here, because a word begins with the space before it."""
    return text[place] == " " and not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace()


class PriorityExecutor:
    """Runs work in a daemon thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting: queue.PriorityQueue[tuple[float, int, Work[Any], Future[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()  # first come, first served for equal priorities
        self._clock = clock
        threading.Thread(target=self._run, name="specplugins-line", daemon=True).start()

    def submit(self, size: int, work: Work[T]) -> "Future[T]":
        """Schedules `work` on `size` characters, which yields after each piece, and returns its future. It can be
        cancelled until it starts."""
        future: Future[T] = Future()
        self._waiting.put((self._clock() + size * SECONDS_PER_CHARACTER, next(self._order), work, future))
        return future

    def _run(self) -> None:
        while True:
            self._work_on(self._waiting.get())  # it must not keep a reference to finished work

    def _work_on(self, entry: tuple[float, int, Work[Any], Future[Any]]) -> None:
        *_, work, future = entry
        if not future.running() and not future.set_running_or_notify_cancel():
            return
        try:
            next(work)
        except StopIteration as end:
            future.set_result(end.value)
        except BaseException as error:
            future.set_exception(error)
        else:
            self._waiting.put(entry)
