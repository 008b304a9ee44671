"""Model Runner V2: what a step has left behind early layers, and which tokens came out. Nothing here waits."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from vllm_specplugins.draft import Early, Target
from vllm_specplugins.engine.v2.arriving import Arriving
from vllm_specplugins.proposers.chosen_layer import ChosenLayer


def early_of(
    input_batch: Any,
    states: Mapping[int, torch.Tensor],  # by number of layers, [num_tokens of the step, hidden_size]
    num_sampled: torch.Tensor,  # [num_reqs]
    num_rejected: torch.Tensor,  # [num_reqs]
    last_sampled: torch.Tensor,  # [max_num_reqs, 1]
    drafts: torch.Tensor,  # [num_reqs, K], for its width alone
) -> Early:
    """Of the rows of a step. Each token that came out but the last is the draft that was fed behind its place."""
    rows = slice(input_batch.num_reqs)
    num_tokens = num_sampled[rows].long()
    newest = input_batch.query_start_loc[1 : input_batch.num_reqs + 1].long() - 1 - num_rejected[rows]
    steps = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    back = (num_tokens[:, None] - 1 - steps).clamp_(min=0)
    places = newest[:, None] - back
    last = last_sampled.view(-1)[input_batch.idx_mapping[rows]].long()[:, None]
    fed = input_batch.input_ids[(places + 1).clamp_(max=input_batch.num_tokens - 1)].long()
    return Early(states, places, torch.where(back > 0, fed, last), num_tokens)


class LateChoice:
    """The layer of an exit by what was counted until the step before, which has arrived by now.

    Args:
        share: see draft.PagedForward.
    """

    def __init__(self, chosen: ChosenLayer, share: Callable[[int], float]):
        self._chosen = chosen
        self._counts: Arriving | None = None
        self._shares = np.array([share(layer) for layer in chosen.choice.layers])

    def layer(self, target: Target, slots: torch.Tensor) -> int:
        """For this step, of which the candidates are looked at now and then, too; once a step. `slots` [num_reqs]."""
        if self._counts is not None:
            self._chosen.learn(self._counts.values(), self._shares)
        counts = self._chosen.look(target, slots.long())
        self._counts = None if counts is None else Arriving((), counts)
        return self._chosen.choice.layer
