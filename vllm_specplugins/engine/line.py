"""A line in which work waits for one thread, the shortest first.

A client's long texts so delay its own answers, and others' by one text at most: that which is being worked on.
"""

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Line:
    """Runs functions in a daemon thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.PriorityQueue[tuple[int, int, Callable[[], Any], Future[Any]]] = queue.PriorityQueue()
        self._order = itertools.count()  # among equals, first come
        threading.Thread(target=self._work, name="specplugins-line", daemon=True).start()

    def submit(self, size: int, function: Callable[[], Any]) -> "Future[Any]":
        """The result of a function that takes about as long as `size` is large; it may be cancelled while it waits."""
        future: Future[Any] = Future()
        self._waiting.put((size, next(self._order), function, future))
        return future

    def _work(self) -> None:
        while True:
            _, _, function, future = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
