"""A layer to exit from that is chosen while serving: the candidates' shadows, and the choice by what they count."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_specplugins.draft import PagedForward, ProposerContext, Target
from vllm_specplugins.proposers.draft_sampler import DraftSampler
from vllm_specplugins.proposers.exit_choice import ExitChoice, Floats
from vllm_specplugins.proposers.exit_head import ExitHead
from vllm_specplugins.proposers.exit_shadow import Shadow
from vllm_specplugins.proposers.records import Rows


class ChosenLayer:
    """Of all requests together; on every rank the one of rank 0."""

    def __init__(
        self, layers: Sequence[int], heads: Mapping[int, ExitHead], sampler: DraftSampler, context: ProposerContext
    ):
        self.choice = ExitChoice(layers, context.max_num_draft, agreed=context.agreed)
        self._shadow = Shadow(layers, heads, sampler, context.max_num_reqs + 1, context.device)
        self._rows = Rows()

    def of(self, request_ids: Sequence[str], target: Target) -> int:
        """The layer for this step, which waits for what it looks at; that of the step before in a rehearsal."""
        rows = torch.from_numpy(self._rows.of(request_ids)).to(target.num_tokens.device)
        self._shadow.make_room(self._rows.num_rows)
        counts = self.look(target, rows)
        if counts is not None:
            self.learn(counts.cpu().numpy(), self.shares(target.forward))
        return self.choice.layer

    def look(self, target: Target, slots: torch.Tensor) -> torch.Tensor | None:
        """What the candidates would have drafted for what came out (see Shadow.look), if this step is looked at; waits
        for nothing."""
        if target.early is None or not self.choice.begin_step():
            return None
        return self._shadow.look(target, slots, self.choice.begins_anew)

    def learn(self, counts: npt.NDArray[Any], shares: Floats) -> None:
        """See ExitChoice.learn. To verify is to read all weights, to draft a token is to read a share [C] of them."""
        self.choice.learn(counts, shares, np.ones(1))

    def shares(self, forward: PagedForward) -> Floats:
        """[C], see PagedForward.share."""
        return np.array([forward.share(layer) for layer in self.choice.layers])

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops what is held of these requests."""
        self._rows.forget(request_ids)
