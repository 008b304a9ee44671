"""What an exit of each of several layers would have drafted for the tokens that came out.

The target's own pass over what it verifies leaves a state behind every layer; read through norm and head it says what
a draft from that layer would have been, given the tokens before, for the price of the head. Nothing here waits.
C: candidates, R: requests, T: tokens of a step, K + 1, H: hidden size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_specplugins.draft import Early, Target
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.exit_head import ExitHead


class Shadow:
    """Looks, and counts.

    Args:
        layers: the candidates.
        heads: of layers that have one of their own.
        sampler: how drafts are drawn; where it draws with noise of its own, the likeliest token stands for them.
        num_slots: of requests.
    """

    def __init__(
        self, layers: Sequence[int], heads: Mapping[int, ExitHead], sampler: DraftSampler, num_slots: int, device: Any
    ):
        self._layers, self._heads, self._sampler = layers, heads, sampler
        # By slot, whether each candidate had the newest token right; -1: not known.
        self._newest = torch.full((num_slots, len(layers)), -1, dtype=torch.int8, device=device)

    def make_room(self, num_slots: int) -> None:
        """For so many requests."""
        more = self._newest.new_full((max(0, num_slots - len(self._newest)), len(self._layers)), -1)
        self._newest = torch.cat((self._newest, more)) if len(more) else self._newest

    def look(self, target: Target, slots: torch.Tensor, begins_anew: bool) -> torch.Tensor:
        """[C, 2, 2] int64 tokens of this step, by whether a candidate had the one before right, and this one.

        Args:
            slots: [R] int64, whose rows these are, no two the same.
            begins_anew: whether the step before was not looked at.
        """
        assert target.early is not None
        if begins_anew:
            self._newest.fill_(-1)
        early = target.early()
        return self._counts(self._said(target, early), early, slots)

    def _said(self, target: Target, early: Early) -> torch.Tensor:
        """[C, R, T] what each candidate would have drafted where each token was said."""
        forward, places = target.forward, early.places.flatten()
        states = [early.states[layer][places] for layer in self._layers]
        own = [index for index, layer in enumerate(self._layers) if layer not in self._heads]
        said: list[Any] = [None] * len(states)
        if own and not self._is_raced:  # one read of the target's head for all of them
            tokens = forward.argmax(forward.normed(torch.cat([states[index] for index in own])))
            for index, some in zip(own, tokens.split(len(places)), strict=True):
                said[index] = some
        for index, layer in enumerate(self._layers):
            if said[index] is None:
                head = self._heads.get(layer)
                logits = forward.logits(forward.normed(states[index])) if head is None else head.logits(states[index])
                said[index] = self._chosen(target, early, logits)
        return torch.stack([tokens.view(early.places.shape) for tokens in said])

    def _chosen(self, target: Target, early: Early, logits: torch.Tensor) -> torch.Tensor:
        """[R * T] tokens that would have been drafted."""
        if not self._is_raced:
            return logits.argmax(dim=-1)
        steps = torch.arange(early.places.shape[1], device=logits.device)
        positions = (target.num_tokens - early.num_tokens)[:, None] + steps
        return self._sampler.choose(target, logits, positions.flatten())[0]

    @property
    def _is_raced(self) -> bool:
        """Whether drafts are drawn with the noise of verification."""
        return self._sampler.is_one_hot and not self._sampler.is_greedy

    def _counts(self, said: torch.Tensor, early: Early, slots: torch.Tensor) -> torch.Tensor:
        is_right = (said == early.token_ids).to(torch.int8)
        exists = torch.arange(said.shape[2], device=said.device) < early.num_tokens[:, None]
        newest = self._newest[slots]
        before = torch.cat((newest.T[:, :, None], is_right[:, :, :-1]), dim=2)
        ends = (early.num_tokens - 1).clamp(min=0)
        own = is_right.gather(2, ends.expand(len(said), -1)[:, :, None])[:, :, 0].T
        self._newest[slots] = torch.where(early.num_tokens[:, None] > 0, own, newest)
        kinds = [(before == one) & (is_right == other) & exists for one in (0, 1) for other in (0, 1)]
        return torch.stack(kinds, dim=1).sum(dim=(2, 3)).view(-1, 2, 2)
