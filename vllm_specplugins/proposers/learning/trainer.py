"""Trains a copy of a serving part in a thread of its own, tests it, and says which weights shall serve.

It trains as `train-*` do (heads/distillation.py), on windows of the traffic; the candidate is the running mean of what
is trained. Knows neither the engine nor where the weights are saved.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_specplugins.proposers.heads.distillation import Guesser, States, distil
from vllm_specplugins.proposers.heads.trained import TrainedPart
from vllm_specplugins.proposers.learning.pace import Pace
from vllm_specplugins.proposers.learning.promotion import LEAST_WINDOWS, Comparison, acceptance_length
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.windows import Window, Windows

STEP_WINDOWS = 8  # of an optimizer step
ROUND_STEPS = 24  # from test to test
TESTED_WINDOWS = 64  # of a test, at most
PASSES = 32  # over all that comes; then it waits for more
LEARNING_RATE, MEAN_DECAY = 1e-3, 0.95
EMPTY_PAUSE_S = 0.5

MakeGuesser = Callable[[Any, Any], Guesser]  # of a model and a part


@dataclass(slots=True)
class Results:
    """Running totals; and of the last test the expected acceptance lengths of the weights that the engine was started
    with, and of those that serve."""

    steps: int = 0
    candidates: int = 0
    promotions: int = 0
    rollbacks: int = 0
    lengths: dict[str, float] = field(default_factory=dict)


class Trainer:
    """See the module.

    Args:
        loaded: the part that the engine was started with.
        serving: the one that serves.
        promote: takes the weights that shall serve from the next step on.
    """

    def __init__(
        self,
        loaded: TrainedPart,
        serving: TrainedPart,
        model: ServedEnd,
        make_guesser: MakeGuesser,
        windows: Windows,
        num_draft: int,
        pace: Pace,
        promote: Callable[[TrainedPart], None],
    ):
        self.results = Results()
        self._windows, self._num_draft, self._pace, self._promote = windows, num_draft, pace, promote
        self._model, self._make_guesser = model, make_guesser
        self._loaded, self.serving, self.candidate = loaded.float(), _copy(serving), _copy(serving)
        self._random, self._num_trained = np.random.default_rng(0), 0
        self.restart()

    @property
    def num_bytes(self) -> int:
        """Of the weights that are held: four parts, gradients and the optimizer's two moments."""
        num_weights: int = sum(tensor.numel() for tensor in self.candidate.parameters())
        return 7 * 4 * num_weights

    def restart(self) -> None:
        """Trains from the serving weights on."""
        self._trained = _copy(self.serving).requires_grad_()
        self._optimizer = torch.optim.AdamW(
            self._trained.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        _assign(self.candidate, self.serving)

    def round(self) -> None:
        """Some steps and a test, where there is enough to learn from; else a pause."""
        has_test = self._windows.count(is_held_out=True) >= LEAST_WINDOWS
        has_new = self._num_trained < PASSES * self._windows.num_closed
        if not (has_test and has_new and self._windows.count(is_held_out=False) >= STEP_WINDOWS):
            self._pace.pause(EMPTY_PAUSE_S)
            return
        for _ in range(ROUND_STEPS):
            self.step()
        self.test()

    def step(self) -> None:
        """One of the optimizer's."""
        windows = list(self._sampled(False, STEP_WINDOWS))
        if not windows:
            return
        guesser, num_tokens = self._make_guesser(self._model, self._trained), sum(len(w.token_ids) for w in windows)
        distil(self._model, self._paced(windows), guesser, self._num_draft, num_tokens)
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            new = list(self._trained.parameters())
            torch._foreach_lerp_(list(self.candidate.parameters()), new, 1 - MEAN_DECAY)
        self._num_trained += len(windows)
        self.results.steps += 1

    def test(self) -> None:
        """Compares what was loaded, what serves and the candidate; promotes, rolls back, or drops."""
        parts = {"loaded": self._loaded, "serving": self.serving, "candidate": self.candidate}
        with torch.no_grad():
            found, tenants = self._lengths(parts)
        if len(tenants) < LEAST_WINDOWS:
            return
        lengths = dict(zip(parts, np.array(found).T, strict=True))
        self.results.candidates += 1

        def compare(one: str, other: str) -> Comparison:
            return Comparison(lengths[one] - lengths[other], np.array(tenants))

        if compare("serving", "loaded").is_worse:
            self.results.rollbacks += 1
            self._serve(self._loaded, lengths["loaded"], lengths["loaded"])
            self.restart()
        elif compare("candidate", "serving").is_better and not compare("candidate", "loaded").is_worse:
            self.results.promotions += 1
            self._serve(self.candidate, lengths["candidate"], lengths["loaded"])
        else:
            self._note(lengths["serving"], lengths["loaded"])
            if compare("candidate", "serving").is_worse:
                self.restart()

    def _lengths(self, parts: dict[str, TrainedPart]) -> tuple[list[list[float]], list[int]]:
        """By window the expected acceptance length of each part, and whose windows they are."""
        found, tenants = [], []
        guessers = [self._make_guesser(self._model, part) for part in parts.values()]
        for window in self._sampled(True, TESTED_WINDOWS):
            states, full = self._model.states_of(window), self._model.logits(window.states)
            text = states, full, window.next_ids, window.temperature
            own = []
            for guesser in guessers:
                own.append(acceptance_length(*text, guesser, self._num_draft))
                self._pace.rest()
            found.append(own)
            tenants.append(window.tenant)
        return found, tenants

    def _serve(self, part: TrainedPart, lengths: Any, loaded: Any) -> None:
        _assign(self.serving, part)
        self._promote(self.serving)
        self._note(lengths, loaded)

    def _note(self, serving: Any, loaded: Any) -> None:
        self.results.lengths = {"loaded": float(loaded.mean()), "serving": float(serving.mean())}

    def _sampled(self, is_held_out: bool, most: int) -> Iterator[Window]:
        for slot in self._windows.sample(is_held_out, most, self._random):
            if (window := self._windows.read(slot)) is not None:
                yield window

    def _paced(self, windows: list[Window]) -> Iterator[States]:
        """A window is a piece of work."""
        for window in windows:
            yield self._model.states_of(window)
            self._pace.rest()


def _copy(part: TrainedPart) -> TrainedPart:
    own: TrainedPart = copy.deepcopy(part).float().requires_grad_(False)
    return own


def _assign(part: TrainedPart, other: TrainedPart) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(part.parameters()), list(other.parameters()))
