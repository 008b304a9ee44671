"""Chooses the number of tokens that a step drafts for each request, which is the same for all requests, from measured
times (step_times.py)."""

from collections.abc import Callable, Sequence
from math import inf, nan
from time import perf_counter

from vllm_specplugins.gate.step_times import StepTimes

_FREE = 64  # tokens of a step that a GPU verifies in the time of one token per request


def fill_a_graph(num_reqs: int, max_num_draft: int) -> bool:
    """Returns whether K tokens per request are free: then the scheduler plans all of them, and the step is one full
    graph. With more requests, tokens without a match cost more than a step without a graph."""
    return num_reqs * (1 + max_num_draft) <= _FREE


class CommonLength:
    """Maps a number of requests to the number of tokens to draft for each in this step.

    A length stays for at least two steps. The second step drafts and verifies the same number of tokens, so its time
    belongs to that length. A step's time runs from the end of the previous step to its end, since device and host each
    process one step at a time. `clock` returns seconds. All drafts of a step fit into `step_tokens`, since shortened
    drafts would not show the time of a length.
    """

    def __init__(self, times: StepTimes, clock: Callable[[], float] = perf_counter, step_tokens: float = inf):
        self.times, self._clock, self._step_tokens = times, clock, step_tokens
        self._length, self._holds = times.lengths[-1], False
        self._at = nan  # time at which the last step ended

    def __getitem__(self, num_reqs: int) -> int:
        self._holds = not self._holds
        if self._holds:
            room = self._step_tokens / max(1, num_reqs) - 1
            self._length = self.times.choose(num_reqs, sum(length <= max(0, room) for length in self.times.lengths))
        return self._length

    def step_ms(self) -> float:
        """Returns the time since the end of the last step, or nan if it is unknown. The caller calls it at the end of
        each step."""
        before, self._at = self._at, self._clock()
        return 1000 * (self._at - before)

    def add(
        self, num_reqs: int, verified: int, drafted: int, step_ms: float, emitted: Sequence[int], share: float = 1.0
    ) -> None:
        """Learns from a step whose verified and drafted lengths agree (StepTimes.add)."""
        if verified == drafted and num_reqs:
            self.times.add(num_reqs, verified, step_ms, emitted, share)

    def pause(self) -> None:
        """Stops the clock while there are no requests."""
        self._at = nan
