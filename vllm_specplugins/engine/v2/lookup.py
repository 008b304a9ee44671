"""Model Runner V2: prompt lookup on the device. Nothing here waits: the tokens never come to the host.

Every rank of a tensor-parallel group has the same tokens and so the same drafts. What became of them is known on the
host one step late.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplugins.engine.v2.graphs import graphs_of_rows, record, replayed
from vllm_specplugins.engine.v2.limits import Limits
from vllm_specplugins.engine.v2.outcomes import Outcomes
from vllm_specplugins.engine.v2.report import LateReport, warms_up
from vllm_specplugins.engine.v2.texts import DeviceTexts
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.drafted import of_stage


class LookupSpeculator(BaseSpeculator):
    """Drafts for all rows of a step by two launches of kernels/history_match, in one CUDA graph with all the rest."""

    supports_mm_inputs = False
    draft_logits = None
    budget_implementation: str | None = None  # of kernels/budget; the reference where the kernel failed its check
    barrier: FaultBarrier  # set by runner.attach; it counts, and has nothing to guard

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        config = vllm_config.speculative_config
        self.device, self._vllm_config = device, vllm_config
        self._max_num_draft = vllm_config.num_speculative_tokens
        self._limits = Limits(req_states, vllm_config.model_config, self._max_num_draft, device)
        self.texts = DeviceTexts(req_states, self._max_num_draft, config.plugin_config.own, device)
        self.report = LateReport()
        self.enable_adaptive_verification = config.enable_adaptive_verification  # vLLM's; see engine/adaptive.py
        self.outcomes = Outcomes(1, req_states, self._max_num_draft, device)
        self.draft_token_confidence_probs, self.tally = self.outcomes.probs, self.outcomes.tally
        self._graphs: CudaGraphManager | None = None
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._draft_tokens = torch.zeros(max_num_reqs, self._max_num_draft, dtype=torch.int64, device=device)

    @property
    def proposer(self) -> Any:
        """What the barrier holds."""
        return self.texts

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
            self._graphs = graphs_of_rows(self._vllm_config, self.device)

    def capture(self) -> None:
        """Records one graph for each batch size."""
        if self._graphs is not None:
            record(self._graphs, self._draft)

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        self._limits.add(new_requests)
        self.texts.add(new_requests)
        self.outcomes.add(new_requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        self.texts.remove(request_ids)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: Any,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """vLLM's signature; returns [num_reqs, K] int64, padded with 0, which is a token that can be verified."""
        num_reqs = input_batch.num_reqs
        most = self._max_num_draft if num_speculative_tokens is None else num_speculative_tokens
        rehearses = dummy_run or warms_up(input_batch.req_ids)
        if not rehearses and self.tally.rests(input_batch, most):
            self.outcomes.rest()
            return self._draft_tokens[:num_reqs]
        self._limits.most = most
        self.outcomes.begin(
            input_batch.idx_mapping[:num_reqs], num_sampled[:num_reqs], num_rejected[:num_reqs], rehearses
        )
        if not replayed(self._graphs, num_reqs):  # a step's last token is the one that it sampled
            self._draft(num_reqs, 1 + int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max()))
        drafts = self._draft_tokens[:num_reqs]
        if not rehearses:
            self.report.tell(self.outcomes, input_batch, drafts)
        return drafts

    def _draft(self, num_rows: int, longest: int | None = None) -> None:
        """What a graph records: of texts of any length, where none is known to be the longest."""
        if self.enable_adaptive_verification:
            self.outcomes.learn(num_rows)
        slots, num_sampled = self.outcomes.rows(num_rows)
        wanted = self._limits.wanted(slots, num_sampled)
        match = self.texts.match(slots, wanted, longest)
        self._draft_tokens[:num_rows].copy_(match.token_ids)
        drafts = of_stage(0, match.token_ids, match.num_draft, match.match_length)
        self.outcomes.keep(drafts, wanted, self.enable_adaptive_verification)
