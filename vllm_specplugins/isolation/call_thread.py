"""A thread to call a proposer's code in, so that a call that does not end can be left behind."""

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
        self._answers: _Answers | None = None  # of the call under way: each has a queue of its own, so that a late
        # answer reaches nobody
        self._random_numbers = np.random.MT19937()
        threading.Thread(target=_work, args=(self._jobs,), name="specplugins-proposer", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    @property
    def is_busy(self) -> bool:
        """Whether a call that was left behind has not returned yet."""
        return self._answers is not None and self._answers.empty()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """The function's result; TimeoutError if it does not return in time, and then it is left behind."""
        with self._own_random_numbers():
            self.start(function)
            result: T = self.take(timeout_s)
            return result

    def start(self, function: Callable[[], Any]) -> None:
        """Begins to run a function, which draws from the engine's generators if it draws from the global ones."""
        assert not self.is_busy
        self._answers = SimpleQueue()
        self._jobs.put((function, self._answers))

    def take(self, timeout_s: float) -> Any:
        """The result of the one that was started; TimeoutError if it does not return in time."""
        assert self._answers is not None
        try:
            result = self._answers.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        self._answers = None
        return result

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """The state of NumPy's and torch's global generators is the process's, not a thread's, and tensor-parallel
        ranks draw the same seeds from it each: a proposer on one of them must leave it as it is.

        A call that was left behind draws from the engine's; nobody can help that.
        """
        torch = sys.modules.get("torch")  # who has not loaded it has drawn nothing from it
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
    while (job := jobs.get()) is not None:
        function, answers = job
        answers.put(function())
        del job, function, answers  # the batch of a step must not live until the next one
