"""The target's layers on its paged KV cache, as both runners have them, and LoRA adapters of the rows that they run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from vllm_specplugins.engine.target.layers import FirstLayers

_CLAIMS = ("supports_draft_decode_metadata_update", "update_draft_decode_metadata", "__init__")


class Adapters:
    """LoRA: layers that draft run each request's own. vLLM's wrapped layers learn from one mapping, made anew for each
    step, which row of tokens runs which adapter.
    """

    def __init__(
        self,
        select: Callable[..., None],  # vLLM's: adapters by row of logits, by row of tokens, and what they are
        ids: np.ndarray[Any, np.dtype[np.int32]],  # [num_reqs], 0: none
        requests: set[Any],
    ):
        self._select, self._ids, self._requests = select, ids, requests
        self._length = 0

    def spread(self, length: int) -> None:
        """The next rows are so many tokens of each request."""
        if length == self._length:
            return
        rows = tuple(self._ids.repeat(length).tolist())
        self._select(rows, rows, self._requests)
        self._length = length


class PagedLayers:
    """target.PagedForward, but for attention, which is each runner's own. T: tokens of each request."""

    # At these positions, [num_reqs] or [num_reqs, T]; gives them as [num_reqs * T].
    attention: Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]

    def __init__(self, layers: FirstLayers, adapters: Adapters | None):
        self._layers, self._adapters = layers, adapters
        self.logits, self.argmax = layers.logits, layers.argmax

    def embeddings(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._spread(token_ids)
        return self._layers.embeddings(token_ids)

    def hidden_states(
        self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        def run(fed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self._layers(end_layer, fed.flatten(), positions, normed)

        return self._at(run, token_ids, positions).view(*token_ids.shape, -1)

    def hidden_states_of(
        self, first_layer: int, end_layer: int, states: torch.Tensor, positions: torch.Tensor, normed: bool = True
    ) -> torch.Tensor:
        def run(fed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self._layers.of_states(first_layer, end_layer, fed.flatten(0, -2), positions, normed)

        attends = first_layer < end_layer
        found = self._at(run, states, positions) if attends else run(states, positions)
        return found.view(states.shape)

    def _at(self, run: Callable[..., torch.Tensor], fed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`run`, with attention at these positions."""
        self._spread(positions)
        with self.attention(positions) as flat:
            return run(fed, flat)

    def _spread(self, rows: torch.Tensor) -> None:
        if self._adapters is not None:
            self._adapters.spread(1 if rows.ndim == 1 else rows.shape[1])


def updates_in_place(group: Any) -> bool:
    """Whether the attention metadata of a draft can be brought up to date in place.

    Not so where a class overrides `build` alone, as chunked local attention does, which derives batches of its own
    from lengths: it has inherited the claim, and an update that does not know of them.
    """
    if not group.supports_draft_decode_metadata_update:
        return False
    kinds = type(group.get_metadata_builder()).__mro__
    builds = next(index for index, kind in enumerate(kinds) if "build" in vars(kind))
    claims = next(index for index, kind in enumerate(kinds) if any(name in vars(kind) for name in _CLAIMS))
    return claims <= builds
