"""Model Runner V2: runs a proposer that reads tokens on the host, with or without the target's layers. It waits for one
small copy of the sampled tokens per step. Under tensor parallelism, rank 0 drafts for all ranks unless the target's
layers draft: after a time-out on one rank, the ranks would verify different drafts."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vllm_specplugins.draft import Draft, DraftBatch, Feedback, Int32Array
from vllm_specplugins.engine.messages import DraftLengths
from vllm_specplugins.engine.v2.feedback.report import Tally
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.base import Speculator
from vllm_specplugins.isolation.exchange import spread
from vllm_specplugins.stage import stage_of
from vllm_specplugins.structures.arrays import Views, view
from vllm_specplugins.structures.drafts import put_logits

_NO_TOKENS = view(np.zeros(1, np.int32))  # text of rows without a history


class HostSpeculator(Speculator):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        super().__init__(vllm_config, device, req_states)
        self._requests: dict[str, Request] = {}
        self._offsets = torch.arange(-self.num_speculative_steps - 1, 0, device=device)
        self.tally: Tally | None = None  # counts of logits from which tokens were drawn
        if self.draft_logits is not None:
            self.tally = Tally(self.max_num_reqs, self.num_speculative_steps, 0, device)
        self._drafted_at = 0.0  # time at which the last drafting ended
        self._scheduler_drafts = vllm_config.speculative_config.plan.scheduler_alone

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to capture."""

    def capture(self) -> None:
        """Nothing to capture."""

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests, which may be the next turn of a session."""
        super().add(requests)
        self.remove({request.request_id for request in requests if request.request_id in self._requests})
        self._requests |= {request.request_id: request for request in requests if request.has_token_ids}

    def remove(self, request_ids: set[str]) -> None:
        gone = {name: self._requests.pop(name).token_ids for name in request_ids if name in self._requests}
        if request_ids:
            self.session.barrier.forget(sorted(request_ids), gone)

    def rests(self, input_batch: Any, length: int) -> bool:
        """Returns whether drafting is off in this step and the last one; otherwise a proposer on the host reads every
        token."""
        return self.num_off > 1 and not input_batch.has_prefill

    def note(self, input_batch: Any, length: int, rests: bool) -> None:
        self._drafted_at = time.perf_counter() if self.num_off else self._drafted_at

    def _rehearse(self, input_batch: Any, is_profile: bool, skip_attn: bool) -> None:
        """Runs a dummy run, which takes the memory and time of drafting. Without attention there is no KV cache yet."""
        if not self.runs_target:
            return
        if self.tally is not None:
            self.tally.begin(False)
        self.idx_mapping.fill_(-1)
        stage = stage_of(self.session.barrier.proposer)
        self._keep(stage.dummy_run(self._batch_of(input_batch, attends=not skip_attn)))

    def _draft_step(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, length: int) -> None:
        group, drafts = get_tp_group(), self.draft_tokens[: input_batch.num_reqs]
        self.idx_mapping[: input_batch.num_reqs].copy_(input_batch.idx_mapping)
        if self.tally is not None:
            self.tally.begin(True)
        if self.runs_target or group.rank_in_group == 0:
            with gpu_sync_allowed():
                draft = self._propose(input_batch, num_sampled, num_rejected, length)
                self._keep(draft)
                rows = drafts.tolist() if input_batch.has_structured_output_reqs else None
            lengths = DraftLengths(input_batch.req_ids, draft.num_draft.tolist())
            self.report.tell(lengths, rows and (lambda: rows))
        if not self.runs_target and group.world_size > 1:
            group.broadcast(drafts, src=0)

    def _read(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> tuple[list[int], Int32Array, Int32Array]:
        """Waits for the sampled tokens and appends them to the histories. Returns the rows that sampled a token, and
        their numbers of accepted and rejected draft tokens."""
        slots, req_states = input_batch.idx_mapping.long(), self._req_states
        lengths = req_states.total_len.gpu[slots, None]
        newest = req_states.all_token_ids.gpu[slots[:, None], (lengths + self._offsets).clamp_(min=0)]
        columns = num_sampled[:, None], num_rejected[:, None], lengths, newest
        host = torch.cat([column.int() for column in columns], dim=1).cpu().numpy()
        rows = []
        for row, (sampled, _, length) in enumerate(host[:, :3].tolist()):
            request = self._requests.get(input_batch.req_ids[row])
            if sampled == 0 or request is None:
                continue
            rows.append(row)
            if request.num_tokens + sampled == length:
                request.extend(host[row, host.shape[1] - sampled :])
            else:
                request.num_tokens = 0
                request.extend(req_states.all_token_ids.gpu[slots[row], :length].cpu().numpy())
        return rows, host[rows, 0] - 1, host[rows, 1]

    def _batch_for(self, input_batch: Any, asked: Sequence[int]) -> DraftBatch:
        """Returns the batch, from which the caller takes the rows that are `asked` on the host."""
        return self._batch_of(input_batch, self._edit_of(input_batch) if self.runs_target else None)

    def _propose(self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, length: int) -> Draft:
        num_reqs, request_ids = input_batch.num_reqs, input_batch.req_ids
        rows, accepted, rejected = self._read(input_batch, num_sampled, num_rejected)
        asked = list(range(num_reqs)) if self.runs_target else rows  # the target runs for all rows
        prompt_lengths = [0] * num_reqs
        max_num_draft = np.zeros(num_reqs, np.int32)  # rows within their prompt want no draft
        token_ids: list[Int32Array] = [_NO_TOKENS] * num_reqs
        options: list[Any] = [{}] * num_reqs
        for row in rows:
            request = self._requests[request_ids[row]]
            token_ids[row], options[row] = request.token_ids, request.limits.options
            prompt_lengths[row] = request.limits.num_prompt_tokens
            max_num_draft[row] = request.limits.max_draft_tokens(request.num_tokens, length)
        batch = replace(
            self._batch_for(input_batch, asked),
            request_ids=[request_ids[row] for row in asked],
            token_ids=Views(token_ids[row] for row in asked),
            options=[options[row] for row in asked],
            max_num_draft=max_num_draft[asked],
            prompt_lengths=[prompt_lengths[row] for row in asked],
        )
        # The clock is read after the wait for vLLM's drafter, whose time is part of the step.
        step_ms = (time.perf_counter() - self._drafted_at) * 1000
        ids, num_decoded = [request_ids[row] for row in rows], int((1 + accepted + rejected).sum())
        times: dict[str, Any] = {"step_ms": step_ms}
        if len(rows) < num_reqs or input_batch.num_tokens > num_decoded:
            times = {"mixed_ms": step_ms * num_decoded / input_batch.num_tokens}
        feedback = Feedback(ids, accepted + rejected, accepted, **times)
        if self._scheduler_drafts:
            self.session.count(feedback, len(rows))
            return Draft.empty(num_reqs)
        draft = self.session.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        return draft if len(asked) == num_reqs else spread(draft, asked, num_reqs, draft.token_ids.shape[1])

    def _keep(self, draft: Draft) -> None:
        """Copies a draft to the tensors that vLLM's verification reads. If the draft is shorter than planned, vLLM also
        verifies tokens after its end, which get a one-hot q."""
        num_reqs, width = draft.token_ids.shape
        tokens, token_ids = self.draft_tokens[:num_reqs].zero_(), draft.token_ids  # vLLM 0.33 may have written -1
        if isinstance(token_ids, np.ndarray):  # tokens after a draft's end are arbitrary
            token_ids = np.where(np.arange(width) < draft.num_draft[:, None], token_ids, 0)
        tokens[:, :width] = torch.as_tensor(token_ids, device=self.device)
        if self.draft_logits is None:
            return
        requests = self.idx_mapping[:num_reqs]
        if draft.logits is not None:
            assert self.tally is not None
            self.tally.add_q(draft.logits, requests)
        is_certain = np.arange(self.num_speculative_steps) >= draft.num_draft[:, None]
        certain = torch.as_tensor(is_certain, device=self.device)
        put_logits(self._draft_logits, requests, tokens, draft.logits, certain)
