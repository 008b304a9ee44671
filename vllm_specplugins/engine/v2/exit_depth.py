"""Model Runner V2: how many tokens an exit drafts in a step, by what was counted until the one before."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_specplugins.counters import StageCounters
from vllm_specplugins.engine.v2.early import LateChoice
from vllm_specplugins.engine.v2.exit_costs import ExitCosts
from vllm_specplugins.proposers.told import Told


class ExitDepth:
    """Of all requests together.

    Args:
        depths: to choose from; the last where nothing is known.
        width: K.
        policy: of the cascade; None for an exit that is alone.
        counters: of the cascade's stages.
        rates: whether the depth is ours to choose.
        layers: of the exit, where they are chosen.
    """

    def __init__(
        self, depths: Sequence[int], width: int, policy: str | None, counters: Sequence[StageCounters], rates: bool,
        layers: LateChoice | None,
    ):  # fmt: skip
        self._most, self._rates, self._layers = depths[-1], rates, layers
        self._told = None if policy is None else Told(counters, policy, width, depths)
        self._costs = ExitCosts()

    def tell(self, request_ids: Sequence[str], numbers: np.ndarray) -> None:
        """Takes what became of a step's drafts: `numbers` [num_reqs, 8 + K], see Told.add."""
        if self._told is not None:
            self._told.add(request_ids, numbers)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is held of these requests."""
        if self._told is not None:
            self._told.forget(request_ids)

    def of(self, manager: Any, request_ids: Sequence[str]) -> int:
        """For this step; `manager` is vLLM's, of what is verified, which is told what that costs."""
        depth = self._most
        if (costs := self._costs.of(manager, len(request_ids))) is None:
            return depth
        scale = 1.0 if self._layers is None else self._layers.cost
        if self._told is not None and self._rates:
            depth = self._told.depth(request_ids, scale * costs[0], costs[1])
        if self._rates or self._layers is not None:
            self._costs.expect(manager, scale * depth / self._most)
        return depth
