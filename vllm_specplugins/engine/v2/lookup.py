"""Model Runner V2: prompt lookup on the device. Nothing here waits: the tokens never come to the host.

Every rank of a tensor-parallel group has the same tokens and so the same drafts. What became of them is known on the
host one step late.
"""

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplugins.draft import Feedback
from vllm_specplugins.engine.v2.arriving import Arriving, Lengths
from vllm_specplugins.engine.v2.report import LateReport, warms_up
from vllm_specplugins.engine.v2.texts import DeviceTexts
from vllm_specplugins.kernels.history_match import Match, history_match
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.confidence import Calibration
from vllm_specplugins.proposers.drafted import of_stage

_SAMPLED, _REJECTED, _WANTED, _DRAFTED = range(4)  # columns of what is counted of a row


class LookupSpeculator(BaseSpeculator):
    """Drafts for all rows of a step in two launches of kernels/history_match."""

    supports_mm_inputs = False
    draft_logits = None
    barrier: FaultBarrier  # set by runner.attach; it counts, and has nothing to guard
    implementation: str | None = None  # of the kernel; the reference where the kernel failed its check

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        config = vllm_config.speculative_config
        self.device, self._req_states = device, req_states
        self._lookup = config.plugin_config.own
        self._max_num_draft = vllm_config.num_speculative_tokens
        self.proposer = DeviceTexts(req_states, self._max_num_draft, self._lookup.max_index_bytes, device)
        self.report = LateReport()
        self._counts: Arriving | None = None
        # vLLM's adaptive verification; see engine/adaptive.py
        self.enable_adaptive_verification = config.enable_adaptive_verification
        max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self._draft_tokens = torch.zeros(max_num_reqs, self._max_num_draft, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros_like(self._draft_tokens, dtype=torch.float32)
        self._calibration = Calibration(1, max_num_reqs, self._max_num_draft, device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to capture."""

    def capture(self) -> None:
        """Nothing to capture."""

    def add(self, new_requests: Any) -> None:
        """Takes requests that are new, or back after a preemption."""
        self.proposer.add(new_requests)
        if new_requests:
            slots = np.array([self._req_states.req_id_to_index[new.req_id] for new in new_requests], np.int64)
            self._calibration.clear(async_tensor_h2d(slots, self.device))

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        self.proposer.remove(request_ids)

    def settle(self) -> None:
        """Counts what became of the last drafts, where no step follows for a while."""
        self._count()

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
        slots, num_sampled = input_batch.idx_mapping[:num_reqs], num_sampled[:num_reqs]
        most = self._max_num_draft if num_speculative_tokens is None else num_speculative_tokens
        wanted = self.proposer.wanted(slots, num_sampled, most)
        # A step's last token is the one that it sampled.
        longest = 1 + int(input_batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        match = self._match(slots, wanted, longest)
        drafts = self._draft_tokens[:num_reqs]
        drafts.copy_(match.token_ids)
        rehearses = dummy_run or warms_up(input_batch.req_ids)
        if self.enable_adaptive_verification:
            if not rehearses:
                num_accepted = (num_sampled - 1).clamp_(min=0)
                self._calibration.learn(slots, num_accepted + num_rejected[:num_reqs], num_accepted)
            self._rate(slots, match)
        if rehearses:
            return drafts
        self._count()
        columns = num_sampled, num_rejected[:num_reqs], wanted, match.num_draft
        self._counts = Arriving(input_batch.req_ids, torch.stack([column.int() for column in columns], dim=1))
        sees_drafts = drafts if input_batch.has_structured_output_reqs else None  # a grammar
        self.report.tell(Lengths(self._counts, _DRAFTED), input_batch.req_ids, sees_drafts)
        return drafts

    def _match(self, slots: torch.Tensor, wanted: torch.Tensor, longest: int) -> Match:
        return history_match(
            self.proposer.histories,
            slots,
            wanted,
            self._max_num_draft,
            self._lookup.min_ngram,
            self._lookup.max_ngram,
            self.proposer.references,
            longest=max(longest, self.proposer.longest_reference),
            implementation=self.implementation,
        )

    def _rate(self, slots: torch.Tensor, match: Match) -> None:
        """How likely each token is to be accepted if those before it are; 0 behind a draft's end."""
        drafts = of_stage(0, match.token_ids, match.num_draft, match.match_length)
        self.draft_token_confidence_probs[: len(slots)] = self._calibration.predict(slots, drafts)

    def _count(self) -> None:
        """Counts the step before, of which all is on the host by now."""
        counts, self._counts = self._counts, None
        if counts is None:
            return
        values = counts.values()
        rows = values[:, _SAMPLED] > 0  # the others were in the middle of their prompt
        sampled, rejected, wanted, drafted = values[rows].T
        request_ids = [name for name, is_in in zip(counts.request_ids, rows, strict=True) if is_in]
        self.barrier.count(Feedback(request_ids, sampled - 1 + rejected, sampled - 1))
        self.barrier.counters.add_drafts(int((wanted > 0).sum()), drafted)
