"""A clock for V2's choice of draft lengths, since the time of a step in an interpreter is meaningless."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class StepClock:
    """Seconds that pass while the model runner runs steps, by `step_ms` of a step's number of tokens."""

    def __init__(self, step_ms: Callable[[int], float]):
        self.seconds, self._step_ms = 0.0, step_ms

    def __call__(self) -> float:
        return self.seconds

    def run(self, num_tokens: int) -> None:
        self.seconds += self._step_ms(num_tokens) / 1000


@contextmanager
def timed_steps(step_ms: Callable[[int], float]) -> Iterator[StepClock]:
    """Engines that start within choose the lengths of drafts themselves, from the times of such a device."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from vllm_specplugins.gate.common_length import CommonLength

    clock, execute_model = StepClock(step_ms), GPUModelRunner.execute_model

    def timed(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        clock.run(scheduler_output.total_num_scheduled_tokens)
        return execute_model(self, scheduler_output, *args, **kwargs)

    init: Any = CommonLength.__init__
    defaults = init.__defaults__
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GPUModelRunner, "execute_model", timed)
        init.__defaults__ = clock, *defaults[1:]
        try:
            yield clock
        finally:
            init.__defaults__ = defaults
