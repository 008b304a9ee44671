"""Model Runner V2: a speculator for model proposers, and the target's layers on the paged KV cache.

Nothing here waits for the device. Rows in the middle of their prompt are drafted for like all others: their
tokens are thrown away by the scheduler, and what they write to the KV cache lies in slots that are written again.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_specplugins.draft import DraftBatch, Feedback, Sampling, Target
from vllm_specplugins.engine.layers import FirstLayers
from vllm_specplugins.engine.report import DraftReport
from vllm_specplugins.proposers.barrier import FaultBarrier


class TargetSpeculator(DraftModelSpeculator):
    """To V2 a draft model without weights and without attention layers of its own."""

    draft_attn_layer_names: set[str]

    def __init__(self, vllm_config: VllmConfig, device: torch.device, barrier: FaultBarrier):
        super().__init__(vllm_config, device)
        self._barrier = barrier
        self.report = DraftReport()
        self._query_starts = torch.arange(self.max_num_reqs + 1, dtype=torch.int32, device=device)

    def add(self, new_requests: Any) -> None:
        """Nothing is kept of a request."""

    def remove(self, request_ids: set[str]) -> None:
        """Tells the proposer which requests are gone."""
        if request_ids:
            self._barrier.forget(sorted(request_ids))

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        self._target = target_model
        self._first_layers = FirstLayers(target_model)
        return nn.Module()

    def set_attn(self, model_state: Any, kv_cache_config: Any, *rest: Any) -> None:
        """The metadata builders need the names of the target's layers; the runner must go on seeing none of ours."""
        none_of_our_own: set[str] = self.draft_attn_layer_names
        self.draft_attn_layer_names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
        super().set_attn(model_state, kv_cache_config, *rest)
        self.draft_attn_layer_names = none_of_our_own

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: torch.Tensor,  # [max_num_reqs, 1]
        next_prefill_tokens: Any,
        temperature: torch.Tensor,  # [max_num_reqs]
        seeds: torch.Tensor,  # [max_num_reqs]
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """vLLM's signature; returns [num_reqs, K] int64."""
        num_reqs = input_batch.num_reqs
        drafts = self.draft_tokens[:num_reqs]
        if dummy_run:
            return drafts
        indexes = input_batch.idx_mapping[:num_reqs].long()
        rejected = num_rejected[:num_reqs]
        last_rows = input_batch.query_start_loc[1 : num_reqs + 1] - 1 - rejected
        target = Target(
            forward=_PagedForward(self, input_batch),
            last_token_ids=last_sampled.view(-1)[indexes].int(),
            num_tokens=(input_batch.seq_lens[:num_reqs] - rejected).long() + 1,
            last_hidden_states=last_hidden_states[last_rows.long()],
            sampling=Sampling(temperature=temperature[indexes], seeds=seeds[indexes]),
        )
        max_num_draft = np.full(num_reqs, self.num_speculative_steps, np.int32)
        batch = DraftBatch(input_batch.req_ids, (), max_num_draft, [{}] * num_reqs, target)
        nothing = np.zeros(0, np.int32)  # what was accepted is on the device; vLLM's own metrics count it
        draft = self._barrier.propose(batch, Feedback((), nothing, nothing))
        drafts[:, : draft.token_ids.shape[1]] = torch.as_tensor(draft.token_ids, device=drafts.device)
        if input_batch.has_structured_output_reqs:  # a grammar has to see the tokens
            rows = drafts.tolist()
        else:
            rows = [[-1] * self.num_speculative_steps] * num_reqs
        self.report.tell(input_batch.req_ids, [row[:n] for row, n in zip(rows, draft.num_draft, strict=True)])
        return drafts


class _PagedForward:
    """draft.PagedForward for the requests of a step; attention metadata is made anew for every token."""

    def __init__(self, speculator: TargetSpeculator, input_batch: Any):
        self._speculator = speculator
        self._input_batch = input_batch
        self._step = 0

    def hidden_states(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        speculator, num_reqs = self._speculator, self._input_batch.num_reqs
        buffers = speculator.input_buffers
        starts = buffers.query_start_loc[: num_reqs + 1].copy_(speculator._query_starts[: num_reqs + 1])
        buffers.input_ids[:num_reqs].copy_(token_ids)
        buffers.positions[:num_reqs].copy_(positions)
        buffers.seq_lens[:num_reqs].copy_(positions + 1)
        slots = speculator.block_tables.compute_slot_mappings(
            self._input_batch.idx_mapping, starts, buffers.positions[:num_reqs], num_reqs
        )
        self._step += 1
        metadata = speculator._build_uniform_attn_metadata(
            batch_desc=BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.NONE, num_tokens=num_reqs, num_reqs=num_reqs, uniform_token_count=1
            ),
            num_reqs=num_reqs,
            num_query_per_req=1,
            seq_lens_cpu_upper_bound=self._input_batch.seq_lens_cpu_upper_bound,
            step=self._step,
        )
        with set_forward_context(
            metadata,
            speculator.vllm_config,
            num_tokens=num_reqs,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=build_slot_mappings_by_layer(slots, speculator.kv_cache_config),
            batch_descriptor=BatchDescriptor(num_tokens=num_reqs),
        ):
            return speculator._first_layers(end_layer, buffers.input_ids[:num_reqs], buffers.positions[:num_reqs])

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._speculator._target.compute_logits(hidden_states)
        return logits
