"""Where the host waits for the device in a step."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Everything since the device was switched on."""

    places: Counter[str] = field(default_factory=Counter)  # where a step waited, "file:line what"
    num_steps: int = 0
    in_step: bool = False
    step_began: float = 0.0  # time.perf_counter()

    @contextmanager
    def step(self, ends: bool = True) -> Iterator[None]:
        """A step, or one of its parts: executing the model, and sampling, which ends it."""
        self.num_steps += ends
        self.in_step, self.step_began = True, time.perf_counter()
        try:
            yield
        finally:
            self.in_step = False
