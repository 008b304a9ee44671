"""What early exit would gain, from match bits and three timed engines. Plain arithmetic: no model, no engine.

A step of K draft tokens that emits n + 1 tokens takes the time of verifying K + 1 tokens and of drafting K. Leviathan
et al. 2023, section 3.3, with measured times in place of their c, and replayed drafts in place of their alpha.
K: num_draft, draft tokens of a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_specplugins.tools.replay.costs import CostTable

Bits = npt.NDArray[np.bool_]


def tokens_per_step(match: Sequence[Bits], num_draft: int) -> float:
    """Mean tokens that a step emits, replayed over outputs; nan if no output is longer than K.

    Drafts are only verified where all earlier ones of the same step were right, so the bits say exactly how many are
    accepted. A step whose draft would pass the end of what is known is not counted.

    Args:
        match: for each output, [num_tokens] whether the exit's greedy token is the output's, given all before it.
        num_draft: K.

    >>> tokens_per_step([np.array([True, True, False, True, False, True])], 2)
    2.5
    """
    num_tokens = num_steps = 0
    for bits in match:
        place = 0
        while place + num_draft <= len(bits):
            drafted = bits[place : place + num_draft]
            emitted = 1 + (num_draft if drafted.all() else int(drafted.argmin()))
            num_tokens, num_steps, place = num_tokens + emitted, num_steps + 1, place + emitted
    return num_tokens / num_steps if num_steps else float("nan")


@dataclass(frozen=True, slots=True)
class Timing:
    """The median step of an engine with early exit at one request, in its two parts.

    Args:
        exit_layer: that drafted.
        num_draft: K.
        verify_ms: of all but drafting: the verification of K + 1 tokens, sampling and scheduling.
        propose_ms: of drafting K tokens.
    """

    exit_layer: int
    num_draft: int
    verify_ms: float
    propose_ms: float

    @property
    def draft_ms(self) -> float:
        """Of one draft token."""
        return self.propose_ms / self.num_draft


@dataclass(frozen=True, slots=True)
class Costs:
    """Where the time of a step goes.

    Args:
        plain_ms: a step without speculation.
        base_ms: of a draft token, whatever the layer: the head, and the call itself.
        layer_ms: of a draft token, for each layer that drafts.
        verify_ms: by K, of verifying K + 1 tokens.
    """

    plain_ms: float
    base_ms: float
    layer_ms: float
    verify_ms: Mapping[int, float]

    @classmethod
    def fit(cls, plain_ms: float, timings: Sequence[Timing]) -> "Costs":
        """The line through the draft costs of engines at two exit layers; one engine gives its cost to all layers."""
        layers = [timing.exit_layer for timing in timings]
        costs = [timing.draft_ms for timing in timings]
        slope, base = np.polyfit(layers, costs, 1) if len(set(layers)) > 1 else (0.0, float(np.mean(costs)))
        by_draft: dict[int, list[float]] = {}
        for timing in timings:
            by_draft.setdefault(timing.num_draft, []).append(timing.verify_ms)
        verify = {num_draft: float(np.mean(ms)) for num_draft, ms in sorted(by_draft.items())}
        return cls(plain_ms, float(base), float(slope), verify)

    def draft_ms(self, exit_layer: int) -> float:
        """Of one draft token."""
        return self.base_ms + self.layer_ms * exit_layer

    def step_ms(self, num_draft: int, draft_ms: float) -> float:
        """Of a step; verification is taken from the line between the nearest K that were timed, 0 among them."""
        table = CostTable({1: self.plain_ms, **{1 + count: ms for count, ms in self.verify_ms.items()}})
        return table.step_ms(1, num_draft) + num_draft * draft_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """The best K of one exit.

    Args:
        num_draft: K.
        tokens_per_step: that it emits.
        speed_up: over no speculation.
        by_num_draft: the speed-up for each K.
    """

    num_draft: int
    tokens_per_step: float
    speed_up: float
    by_num_draft: Mapping[int, float]


def predict(match: Sequence[Bits], costs: Costs, draft_ms: float, max_draft: int) -> Prediction:
    """The K of 1 to max_draft with the largest speed-up, for an exit with these match bits and this cost."""
    emitted = {num_draft: tokens_per_step(match, num_draft) for num_draft in range(1, max_draft + 1)}
    speed_ups = {k: tokens * costs.plain_ms / costs.step_ms(k, draft_ms) for k, tokens in emitted.items()}
    best = max(speed_ups, key=lambda num_draft: speed_ups[num_draft])
    return Prediction(best, emitted[best], speed_ups[best], speed_ups)
