"""Model Runner V2: a proposer that reads tokens on the host, with the target's layers or without.

It waits for the sampled tokens, and knows what became of the last drafts. Under tensor parallelism rank 0 drafts for
the others where the target has no part in it: a time-out on one rank cannot make the ranks verify different drafts.
"""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_specplugins.draft import Draft, Feedback
from vllm_specplugins.engine.v2.feedback.report import DraftReport
from vllm_specplugins.engine.v2.feedback.tally import Tally
from vllm_specplugins.engine.v2.speculators.base import Speculator
from vllm_specplugins.engine.v2.speculators.history import Histories
from vllm_specplugins.engine.v2.verification.verify import likeliest_of
from vllm_specplugins.isolation.barrier import spread
from vllm_specplugins.request_options import draft_limit
from vllm_specplugins.structures.views import Views, view

_NO_TOKENS = view(np.zeros(1, np.int32))  # of a row that wants no draft


class HostSpeculator(Speculator):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._histories = Histories(req_states, self._most_tokens, self.num_speculative_steps, device)
        self.report = DraftReport()
        self.tally: Tally | None = None  # of what tokens were drawn from
        if self.draft_logits is not None:
            self.tally = Tally(self.max_num_reqs, self.num_speculative_steps, 0, device)
        self._drafted_at = 0.0  # when the last drafting ended

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to capture."""

    def capture(self) -> None:
        """Nothing to capture."""

    def add(self, new_requests: Any) -> None:
        """Starts the histories of requests that are new, or back after a preemption."""
        self._histories.add(new_requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        self._histories.remove(request_ids)
        if request_ids:
            self.barrier.forget(sorted(request_ids))

    def _rests(self, input_batch: Any, most: int) -> bool:
        return False

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """A dummy run: costs in memory and time what drafting costs, and belongs to no request.

        Without attention there is no KV cache yet.
        """
        if not self.runs_target:
            return
        if self.tally is not None:
            self.tally.begin(False)
        for buffer in (self._last_token_ids, self._num_tokens, self._last_hidden_states, self._temperature):
            buffer.zero_()
        proposer: Any = self.barrier.proposer
        dummy_run = getattr(proposer, "dummy_run", proposer.propose)
        self._keep(dummy_run(self._batch_of(input_batch, attends=not skip_attn)))

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int) -> None:
        group, drafts = get_tp_group(), self.draft_tokens[: input_batch.num_reqs]
        if self.tally is not None:
            self.tally.begin(True)
        if self.runs_target or group.rank_in_group == 0:
            with gpu_sync_allowed():
                draft = self._propose(input_batch, num_sampled, num_rejected, most)
                self._keep(draft)
                rows = [[-1] * self.num_speculative_steps] * input_batch.num_reqs
                if input_batch.has_structured_output_reqs:  # a grammar has to see the tokens
                    rows = drafts.tolist()
            lengths = draft.num_draft.tolist()
            self.report.tell(input_batch.req_ids, [row[:n] for row, n in zip(rows, lengths, strict=True)])
        if not self.runs_target and group.world_size > 1:
            group.broadcast(drafts, src=0)

    def _propose(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int) -> Draft:
        num_reqs = input_batch.num_reqs
        rows, accepted, rejected = self._histories.extend(input_batch, num_sampled, num_rejected)
        asked = list(range(num_reqs)) if self.runs_target else rows  # a step of the target is that of all
        max_num_draft = np.zeros(num_reqs, np.int32)  # rows in the middle of their prompt want nothing
        places = {row: place for place, row in enumerate(asked)}
        token_ids = [_NO_TOKENS] * num_reqs
        options: list[Any] = [{}] * num_reqs
        for row in rows:
            request = self._histories[input_batch.req_ids[row]]
            token_ids[row], options[row] = request.token_ids, request.options
            max_num_draft[row] = draft_limit(request.options, request.num_tokens, most, self._most_tokens)
        batch = replace(
            self._batch_of(input_batch, self._edit_of(input_batch) if self.runs_target else None),
            request_ids=[input_batch.req_ids[row] for row in asked],
            token_ids=Views(token_ids[row] for row in asked),
            options=[options[row] for row in asked],
            max_num_draft=max_num_draft[asked],
            offer=None if self.offer is None else self.offer.of(asked),
            likeliest=likeliest_of(self.rejection_sampler(), input_batch, {row: places[row] for row in rows}),
        )
        # Behind the offer, which was waited for: what the stage built into vLLM takes is part of the step's time.
        step_ms = (time.perf_counter() - self._drafted_at) * 1000
        only_decoded = len(rows) == num_reqs and input_batch.num_tokens == int((1 + accepted + rejected).sum())
        request_ids = [input_batch.req_ids[row] for row in rows]
        feedback = Feedback(request_ids, accepted + rejected, accepted, step_ms if only_decoded else None)
        draft = self.barrier.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        return draft if len(asked) == num_reqs else spread(draft, asked, num_reqs)

    def _keep(self, draft: Draft) -> None:
        """Copies a draft to where vLLM's verification looks for it.

        A draft may be shorter than the scheduler has planned. Behind its end stand tokens that are verified like any
        others, and certain: without a q of their own, what stands in that row is another step's, or nobody's.
        """
        num_reqs, width = draft.token_ids.shape
        tokens, token_ids = self.draft_tokens[:num_reqs].zero_(), draft.token_ids  # vLLM 0.33 may have written -1
        if isinstance(token_ids, np.ndarray):  # past the end of a draft anything may stand
            token_ids = np.where(np.arange(width) < draft.num_draft[:, None], token_ids, 0)
        tokens[:, :width] = torch.as_tensor(token_ids, device=self.device)
        if self.draft_logits is None:
            return
        requests = self.idx_mapping[:num_reqs].long()
        sampled = 0
        if draft.logits is not None:
            sampled = draft.logits.shape[1]
            assert self.tally is not None
            self.tally.add_q(draft.logits, requests)
            self._draft_logits[requests, :sampled] = draft.logits.to(self._draft_logits.dtype)
        is_certain = np.arange(self.num_speculative_steps) >= np.minimum(draft.num_draft, sampled)[:, None]
        if is_certain.any():
            rows, columns = (torch.from_numpy(index).to(self.device) for index in np.nonzero(is_certain))
            one_hot = self._draft_logits.new_full((len(rows), self._draft_logits.shape[-1]), -torch.inf)
            one_hot.scatter_(1, tokens[rows, columns, None], 0.0)
            self._draft_logits[requests[rows], columns] = one_hot
