"""Which of several layers an exit drafts from: chosen while serving, by what each would have drafted.

On a small share of steps it is looked at what each candidate would have drafted (exit_shadow.py). Tokens in a row make
a chain: how often a candidate is right behind a token that it had right, and behind one that it had wrong. From these
follows what its drafts would bring; with what they cost, which layer promises most tokens for the time of a step. That
the layer may be chosen so is DEL's idea (Entezari Zarch et al. 2025, "DEL: Context-aware dynamic exit layer"). C:
candidates, K: most tokens of a draft.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FIRST_STEPS = 48  # all of which are looked at
LOOK_EVERY, LOOK_STEPS = 64, 4  # after them: so many steps in a row, of so many
DECAY = 0.98  # of what is known, by step that is looked at
GUESS = 0.5  # tokens of each kind, before any was seen
MARGIN = 1.02  # by how much another layer must be better

Floats = npt.NDArray[np.float64]


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The candidates of "auto": an eighth, a quarter and half of the target's layers.

    >>> default_layers(32), default_layers(8), default_layers(2)
    ((4, 8, 16), (1, 2, 4), (1,))
    """
    return tuple(sorted({max(1, num_layers // part) for part in (8, 4, 2)}))


def expected(counts: Floats, most: int) -> Floats:
    """[C, most] how many tokens drafts of 1, 2 ... tokens are expected to get accepted, from these counts.

    A draft begins behind a token that the candidate had wrong, or, if the one before was accepted as a whole, behind
    the token that the target added, which the candidate may have had right or wrong.

    Args:
        counts: [C, 2, 2] tokens, by whether the candidate had the one before right, and this one.

    >>> expected(np.array([[[1.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]]), 3).tolist()
    [[0.5, 0.75, 0.875], [0.0, 0.0, 0.0]]
    """
    behind_wrong, behind_right = (counts[:, :, 1] / counts.sum(axis=2)).T
    survival = behind_right[:, None] ** np.arange(most)  # of a draft whose first token is right
    lost = 1 - ((behind_right - behind_wrong) * behind_right)[:, None] * survival
    first = np.divide(behind_wrong[:, None], lost, out=np.ones_like(survival), where=lost > 0)
    accepted: Floats = first * survival.cumsum(axis=1)
    return accepted


class ExitChoice:
    """The choice, on the host, for all requests together. It reads no clock.

    Args:
        layers: to choose from.
        most: K.
        agreed: see draft.ProposerContext.
    """

    goes_short = False  # whether drafts may be shorter than K, as behind a gate

    def __init__(self, layers: Sequence[int], most: int, agreed: Callable[[Any], Any] = lambda value: value):
        self.layers, self._most, self._agreed = tuple(layers), most, agreed
        self.layer = self.layers[0]
        self.counts = np.full((len(self.layers), 2, 2), GUESS)
        self.num_steps = dict.fromkeys(self.layers, 0)  # with each layer
        self._num_looks = 0  # that were learned from
        self._step = -1

    def begin_step(self) -> bool:
        """Whether to look at what the candidates would have drafted for the tokens of this step."""
        self._step += 1
        self.num_steps[self.layer] += 1
        return self._step < FIRST_STEPS or self._step % LOOK_EVERY < LOOK_STEPS

    @property
    def begins_anew(self) -> bool:
        """Whether the step before was not looked at."""
        return self._step == 0 or (self._step > FIRST_STEPS and self._step % LOOK_EVERY == 0)

    def learn(self, counts: npt.NDArray[Any], draft_costs: Floats, verify_costs: Floats) -> None:
        """Takes what was seen in one step, and now and then chooses.

        Args:
            counts: [C, 2, 2], see `expected`.
            draft_costs: [C], of a token drafted from each layer, in any unit.
            verify_costs: [K] or [1], of a step that verifies drafts of 1, 2 ... tokens, in that unit.
        """
        self.counts = DECAY * self.counts + counts
        self._num_looks += 1
        if self._num_looks % LOOK_STEPS == 0:
            best = self._best(draft_costs, verify_costs)
            self.layer = self._agreed(best)

    def _best(self, draft_costs: Floats, verify_costs: Floats) -> int:
        lengths = np.arange(1, self._most + 1)
        rates = (1 + expected(self.counts, self._most)) / (verify_costs + draft_costs[:, None] * lengths)
        best = rates.max(axis=1) if self.goes_short else rates[:, -1]
        now, then = self.layers.index(self.layer), int(best.argmax())
        return self.layers[then] if best[then] > MARGIN * best[now] else self.layer
