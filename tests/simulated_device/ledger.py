"""What a step costs the device and the host: counted, not timed."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Counts:
    """Sums over one or more steps."""

    steps: int = 0
    launches: int = 0  # kernels and copies within the device, outside of graphs
    replays: int = 0  # graphs that were launched
    replayed_launches: int = 0  # inside of those
    synchronisations: int = 0  # the host waited for the device
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    specialisations: int = 0  # of Triton kernels, first met here

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __truediv__(self, number: int) -> dict[str, float]:
        return {f.name: getattr(self, f.name) / number for f in fields(self)}


@dataclass
class Ledger:
    """Everything since the device was switched on."""

    serving: Counts = field(default_factory=Counts)  # in steps
    starting: Counts = field(default_factory=Counts)  # while engines are made and warmed up
    places: Counter[str] = field(default_factory=Counter)  # where a step waited, "file:line what"
    names: Counter[str] = field(default_factory=Counter)  # of launches outside of graphs, in steps
    specialisations: set[Any] = field(default_factory=set)  # keys of all launches so far
    new_specialisations: list[Any] = field(default_factory=list)  # those first met in a step
    in_step: bool = False
    step_began: float = 0.0  # time.perf_counter()

    @property
    def now(self) -> Counts:
        return self.serving if self.in_step else self.starting

    def launch(self, name: str, number: int = 1) -> None:
        self.now.launches += number
        if self.in_step:
            self.names[name] += number

    def specialisation(self, key: Any) -> None:
        """A launch of a Triton kernel with these kinds of arguments."""
        if key in self.specialisations:
            return
        self.specialisations.add(key)
        self.now.specialisations += 1
        if self.in_step:
            self.new_specialisations.append(key)

    @contextmanager
    def step(self, ends: bool = True) -> Iterator[None]:
        """A step, or one of its parts: executing the model, and sampling, which ends it."""
        self.in_step, self.step_began = True, time.perf_counter()
        self.serving.steps += ends
        try:
            yield
        finally:
            self.in_step = False
