"""Model Runner V2: a model proposer that drafts trees. The scheduler has a whole tree drafted, a chain, or nothing."""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_specplugins.draft import DraftBatch
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.trees.state import Trees
from vllm_specplugins.gate.step_times import lengths_up_to
from vllm_specplugins.structures.arrays import DraftArrays, of_stage


class TreeSpeculator(DeviceSpeculator):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        chain = vllm_config.speculative_config.plugin_config.longest_chain
        self._steps_alone, self._depths = False, lengths_up_to(self.num_speculative_steps, chain)
        self.trees = Trees(vllm_config, self.num_speculative_steps, device)

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        super().add(new_requests)
        if new_requests:
            slots = [self._req_states.req_id_to_index[new.req_id] for new in new_requests]
            self.trees.add(slots, [self._may_branch(*both) for both in zip(slots, new_requests, strict=True)])

    def _may_branch(self, slot: int, new: Any) -> bool:
        params, sampler = new.sampling_params, self.rejection_sampler()
        asks = params.logprobs, params.logprob_token_ids, params.structured_outputs
        return all(own is None for own in asks) and not sampler.editor.edits_any(np.array([slot]))

    def _drafted(
        self, batch: DraftBatch, max_draft: torch.Tensor, num_steps: int
    ) -> tuple[DraftArrays, torch.Tensor | None]:
        proposer: Any = self.barrier.proposer
        num_rows, most = batch.num_reqs, self.num_speculative_steps
        drafts = of_stage(0, max_draft.new_zeros(num_rows, most), max_draft, max_draft * 0.0 + 1)
        rows = self.idx_mapping[:num_rows]
        if num_steps == most:
            tree = proposer.draft_tree(batch.target, most, self.trees.branches(rows))
            drafts.token_ids.copy_(tree.token_ids)
            self.trees.put(rows, tree.parents)
        elif num_steps:
            drafts.token_ids[:, :num_steps] = proposer.draft_from(batch.target, num_steps)[0]
            self.trees.put(rows, self.trees.chain.expand(num_rows, -1))
        return drafts, None

    def _last_rows(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
        return self.trees.last_rows(input_batch, num_sampled, num_rejected)
