"""Trains a copy of a served part on windows of the traffic (distillation.py), tests it, and chooses the served weights.
The candidate is the running mean of the trained weights."""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.proposers.learning.distillation import GUESSERS, Guesser, States, distil
from vllm_specplugins.proposers.learning.pace import Pace
from vllm_specplugins.proposers.learning.promotion import MIN_WINDOWS, Comparison, Floats, acceptance_length
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.windows import Window, Windows

STEP_WINDOWS = 8  # windows of an optimizer step
ROUND_STEPS = 24  # optimizer steps between tests
TESTED_WINDOWS = 64  # maximum number of windows of a test
PASSES = 32  # maximum number of passes over all windows; then the trainer waits for new windows
Part = Any  # a TrainedPart
LEARNING_RATE, MEAN_DECAY = 1e-3, 0.95


class Trainer:
    """Trains from `loaded`, the weights at the engine's start; `promote` receives the weights that serve from the next
    step on."""

    def __init__(
        self,
        loaded: Part,
        serving: Part,
        model: ServedEnd,
        windows: Windows,
        num_draft: int,
        pace: Pace,
        promote: Callable[[Part], None],
    ):
        self.counts = {"steps": 0, "candidates": 0, "promotions": 0, "rollbacks": 0}
        self.lengths: dict[str, float] = {}  # expected lengths in the last test, of loaded and served weights
        self._model, self._windows, self._num_draft = model, windows, num_draft
        self._pace, self._promote = pace, promote
        self._loaded, self.serving, self.candidate = loaded, copied(serving), copied(serving)
        self._random, self._num_trained = np.random.default_rng(0), 0
        self.restart()

    @property
    def num_bytes(self) -> int:
        """Returns the memory of six copies of the part, its gradients and the optimizer's two moments."""
        num_weights: int = sum(tensor.numel() for tensor in self.candidate.parameters())
        return 9 * 4 * num_weights

    def restart(self) -> None:
        self._trained = copied(self.serving).requires_grad_()
        self._optimizer = torch.optim.AdamW(
            self._trained.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        _assign(self.candidate, self.serving)

    def _guesser(self, part: Part) -> Guesser:
        return GUESSERS[type(part)](self._model, part)

    def round(self) -> None:
        has_test = self._windows.count(is_held_out=True) >= MIN_WINDOWS
        has_new = self._num_trained < PASSES * self._windows.num_closed
        if not (has_test and has_new and self._windows.count(is_held_out=False) >= STEP_WINDOWS):
            self._pace.pause()
            return
        for _ in range(ROUND_STEPS):
            self.step()
        self.test()

    def step(self) -> None:
        windows = self._windows.sample(False, STEP_WINDOWS, self._random)
        self._optimize(windows, self._paced(windows))
        self._num_trained += len(windows)
        self.counts["steps"] += 1

    def rehearse(self) -> None:
        """Runs one step to allocate its memory, and discards the result."""
        windows = [self._windows.blank()] * STEP_WINDOWS
        self._optimize(windows, map(self._model.states_of, windows))
        self.restart()

    def _optimize(self, windows: list[Window], states: Iterable[States]) -> None:
        guesser, num_tokens = self._guesser(self._trained), sum(len(w.token_ids) for w in windows)
        distil(self._model, states, guesser, self._num_draft, num_tokens)
        torch.nn.utils.clip_grad_norm_(self._trained.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            new = list(self._trained.parameters())
            torch._foreach_lerp_(list(self.candidate.parameters()), new, 1 - MEAN_DECAY)

    def test(self) -> None:
        """Compares the loaded part, the served part and the candidate, and then promotes the candidate, drops it, or
        rolls back."""
        parts = {"loaded": self._loaded, "serving": self.serving, "candidate": self.candidate}
        with torch.no_grad():
            lengths, tenants = self._lengths(parts)
        self.counts["candidates"] += 1

        def compare(one: str, other: str) -> Comparison:
            return Comparison(lengths[one] - lengths[other], tenants)

        serves = "serving"
        if compare("serving", "loaded").is_worse:
            serves = "loaded"
        elif compare("candidate", "serving").is_better and not compare("candidate", "loaded").is_worse:
            serves = "candidate"
        if serves != "serving":
            self.counts["rollbacks" if serves == "loaded" else "promotions"] += 1
            _assign(self.serving, parts[serves])
            self._promote(self.serving)
        if serves == "loaded" or (serves == "serving" and compare("candidate", "serving").is_worse):
            self.restart()
        self.lengths = {"loaded": float(lengths["loaded"].mean()), "serving": float(lengths[serves].mean())}

    def _lengths(self, parts: dict[str, Part]) -> tuple[dict[str, Floats], npt.NDArray[np.int64]]:
        windows = self._windows.sample(True, TESTED_WINDOWS, self._random)
        lengths: dict[str, list[float]] = {name: [] for name in parts}
        for window in windows:
            states = self._model.states_of(window)
            text = states, self._model.logits(states[-1]), window.next_ids, window.temperature
            for name, part in parts.items():
                lengths[name].append(acceptance_length(*text, self._guesser(part), self._num_draft))
                self._pace.rest()
        tenants = np.array([window.tenant for window in windows])
        return {name: np.array(values) for name, values in lengths.items()}, tenants

    def _paced(self, windows: list[Window]) -> Iterator[States]:
        for window in windows:
            yield self._model.states_of(window)
            self._pace.rest()


def copied(part: Part) -> Part:
    """Returns a copy in float32; tensors that are not parameters are shared."""
    shared = {id(tensor): tensor for tensor in vars(part).values() if isinstance(tensor, torch.Tensor)}
    return deepcopy(part, shared).float()


def _assign(part: Part, other: Part) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(part.parameters()), list(other.parameters()))
