"""Model Runner V2: a model proposer that drafts trees, maybe with a lookup's chain in them. The scheduler has a whole
tree drafted, a chain, or nothing.

What a lookup's tokens are worth is learned from what came out, along whichever path, beside the chain that was found.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_specplugins.cascade.on_device import EXIT, LOOKUP, Parts
from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.trees.state import Trees
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.structures.arrays import DraftArrays, of_stage


class TreeSpeculator(DeviceSpeculator):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        most, chain = self.num_speculative_steps, vllm_config.speculative_config.plugin_config.longest_chain
        self._steps_alone, self._depths = False, lengths_up_to(most, chain)
        self.trees = Trees(vllm_config, most, device)
        self._texts: Any = self.lookups.texts
        # Of all slots, and of nobody: the chain that is learned from, and how long the text before it was.
        self._learned = torch.zeros(self.max_num_reqs + 1, most + 1, dtype=torch.int32, device=device)

    def add(self, requests: Sequence[Request]) -> None:
        """Takes requests."""
        super().add(requests)
        self.trees.add([request.slot for request in requests], [self._may_branch(request) for request in requests])

    def _may_branch(self, request: Request) -> bool:
        params, editor = request.sampling_params, self.rejection_sampler().editor
        asks = params.logprobs, params.logprob_token_ids, params.structured_outputs
        return all(value is None for value in asks) and not editor.edits_any(np.array([request.slot]))

    @property
    def _rates(self) -> bool:
        return bool(self.lookups)

    def _draft_on_device(self, batch: DraftBatch, longest: int | None, num_steps: int) -> bool:
        if num_steps < self.num_speculative_steps:
            self.trees.put(self.idx_mapping[: batch.num_reqs], self.trees.chain)
        if self._rates:
            self.outcomes.fates = self._fates(batch.num_reqs)
        return super()._draft_on_device(batch, longest, num_steps)

    def _fates(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row's chain that is learned from: see DraftTracker. Nothing was tried where it is not the newest."""
        slots, num_sampled = self.outcomes.rows(num_rows)
        texts, learned = self._texts.histories, self._learned[slots]
        places = (texts.lengths[slots] - num_sampled)[:, None] + self._steps
        came = texts.token_ids[slots[:, None], places.clamp(max=texts.token_ids.shape[1] - 1)]
        is_right = (came == learned[:, :-1]) & (self._steps < num_sampled[:, None])
        num_right = is_right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)
        is_newest = (places[:, 0] == learned[:, -1]) & (num_sampled > 0)
        return (num_right + 1) * is_newest, (num_right < num_sampled).int() * is_newest

    def _drafted(
        self, batch: DraftBatch, max_draft: torch.Tensor, num_steps: int
    ) -> tuple[DraftArrays, torch.Tensor | None]:
        if num_steps < self.num_speculative_steps:
            return super()._drafted(batch, max_draft, num_steps)
        return self._grown(batch, self.barrier.proposer, max_draft), None

    def _cascaded(
        self, batch: DraftBatch, slots: torch.Tensor, max_draft: torch.Tensor, longest: int | None, num_steps: int
    ) -> tuple[DraftArrays, torch.Tensor | None, Parts]:
        if num_steps < self.num_speculative_steps:
            drafts, _, told = super()._cascaded(batch, slots, max_draft, longest, num_steps)
            learned = drafts
        else:
            held: Any = self.barrier.proposer
            room, own = self._wanted.of_stages
            is_asked, depth = own > 0, self.limits.of_stages[EXIT]
            learned = self.lookups.found(slots, room, longest)
            self.outcomes.worth(learned, depth)
            survival = self.outcomes.survivals(learned)
            # A request that does not allow the exit has the lookup's chain.
            survival = survival.log().float().masked_fill(~is_asked[:, None], 0.0)
            drafts = self._grown(batch, held.exit, max_draft, is_asked, (learned.token_ids, survival))
            told = Parts(learned.num_draft, torch.where(is_asked, depth, -1), max_draft * 0, learned)
        kept = torch.cat((learned.token_ids, self._texts.histories.lengths[slots, None]), dim=1)
        self._learned[self.trees.own(self.idx_mapping[: batch.num_reqs])] = kept
        return drafts, None, told

    def _grown(
        self, batch: DraftBatch, proposer: Any, max_draft: torch.Tensor, may_branch: Any = True, other: Any = None
    ) -> DraftArrays:
        """A tree of each request, or a chain."""
        rows, most = self.idx_mapping[: batch.num_reqs], self.num_speculative_steps
        tree = proposer.draft_tree(batch.target, most, self.trees.branches(rows) & may_branch, other)
        self.trees.put(rows, tree.parents)
        drafts = of_stage(EXIT if self._policy else 0, tree.token_ids, max_draft, max_draft * 0.0 + 1)
        return drafts._replace(stage=drafts.stage.masked_fill(tree.is_other, LOOKUP))

    def _last_rows(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        return self.trees.last_rows(input_batch, num_sampled, num_rejected)
