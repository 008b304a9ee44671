"""Calls a proposer in a thread that the caller can abandon."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.random import mtrand

T = TypeVar("T")
_Answers = SimpleQueue[Any]
_Jobs = SimpleQueue[tuple[Callable[[], Any], _Answers] | None]


class CallThread:
    """Runs one function at a time in a daemon thread. The functions must not raise."""

    def __init__(self) -> None:
        self._jobs: _Jobs = SimpleQueue()
        self._answers: _Answers | None = None  # only of the current call, so a late answer reaches no other call
        self._random_numbers = np.random.MT19937()
        self._begin()
        weakref.finalize(self, self._jobs.put, None)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="specplugins-proposer", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Returns whether an abandoned call still runs."""
        return self._answers is not None and self._answers.empty() and self._thread.is_alive()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Returns the function's result. Raises TimeoutError, and abandons the function, if it does not return in
        time."""
        with self._separate_random_numbers():
            self.start(function)
            return self.take(timeout_s)

    def start(self, function: Callable[[], Any]) -> None:
        """Starts a function, without separate random number generators."""
        assert not self.is_busy
        if not self._thread.is_alive():  # a timer of the proposer raised an exception in it after a call's end
            self._begin()
        self._answers = SimpleQueue()
        self._jobs.put((function, self._answers))

    def take(self, timeout_s: float) -> Any:
        """Returns the result of the function that `start` started. Raises TimeoutError if it does not return in
        time."""
        assert self._answers is not None
        try:
            result = self._answers.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        self._answers = None
        return result

    @contextmanager
    def _separate_random_numbers(self) -> Iterator[None]:
        """Restores the global generators of NumPy and torch, from which every tensor-parallel rank draws the same
        seeds: a proposer on rank 0 alone must not advance them."""
        torch = sys.modules.get("torch")
        state = None if torch is None else torch.default_generator.get_state()
        engines = mtrand.get_bit_generator()
        mtrand.set_bit_generator(self._random_numbers)
        try:
            yield
        finally:
            mtrand.set_bit_generator(engines)
            if torch is not None:
                torch.default_generator.set_state(state)


def _work(jobs: _Jobs) -> None:
    process = os.getpid()
    while (job := jobs.get()) is not None:
        function, answers = job
        answer = function()
        if os.getpid() != process:
            os._exit(1)  # the proposer forked, and the child must not continue as an engine
        answers.put(answer)
        del job, function, answers, answer  # a batch must not live until the next step
