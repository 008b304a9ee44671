"""A line in which texts wait to be tokenised by one thread, piece by piece, the shortest first as long as it is fair.

A client's long texts so delay its own answers, and others' by one piece at most: that which is being worked on. Who
has waited long enough for a text of its length comes before shorter ones.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
Work = Generator[None, None, T]

PIECE = 4096  # characters, about 20 ms
SECONDS_PER_CHARACTER = 2e-5  # how long a text lets shorter ones pass, four times as long as it takes
SEARCHED = 500  # characters, for a place between two words


def pieces(text: Iterable[str]) -> Iterator[str]:
    """A text, which may come in parts, in pieces that are tokenised as the whole is, but where there is no space for
    long."""
    rest = ""
    for part in text:
        rest, start = rest + part, 0
        while len(rest) - start > PIECE + 1:  # one more, to see whether a word begins
            end = start + PIECE
            end = next((place for place in range(end, end - SEARCHED, -1) if _begins_word(rest, place)), end)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def _begins_word(text: str, place: int) -> bool:
    """Whether tokens end here: a word begins with the space before it."""
    return text[place] == " " and not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace()


class PriorityExecutor:
    """Does work in a daemon thread of its own.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._waiting: queue.PriorityQueue[tuple[float, int, Work[Any], Future[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()  # among equals, first come
        self._clock = clock
        threading.Thread(target=self._run, name="specplugins-line", daemon=True).start()

    def submit(self, size: int, work: Work[T]) -> "Future[T]":
        """The result of work on so many characters, which yields after each piece; it may be cancelled until then."""
        future: Future[T] = Future()
        self._waiting.put((self._clock() + size * SECONDS_PER_CHARACTER, next(self._order), work, future))
        return future

    def _run(self) -> None:
        while True:
            self._work_on(self._waiting.get())  # and keep nothing of it while nobody comes

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
