"""Model Runner V1: runs a drafter of vLLM as a stage of a cascade. The drafter reads all tokens of every step, so its
KV cache is complete."""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker import gpu_model_runner

from vllm_specplugins.cascade.built_in import guard_of
from vllm_specplugins.draft import Draft, DraftBatch, Int32Array, Offer
from vllm_specplugins.engine.built_in import for_built_in
from vllm_specplugins.engine.hooks import replaced
from vllm_specplugins.isolation.barrier import FaultBarrier

DRAFTERS = ("DFlashProposer", "DraftModelProposer", "EagleProposer", "Gemma4Proposer", "Step3p5MTPProposer")
BY_TOKEN = ("DraftModelProposer", "EagleProposer")  # these can read tokens without drafting


def narrowed() -> dict[str, Any]:
    """Patches vLLM's drafter classes so that they build a drafter with the stage's K."""

    def narrow(kind: Any) -> Any:
        return lambda vllm_config, device, runner: kind(for_built_in(vllm_config), device, runner)

    return {name: narrow(getattr(gpu_model_runner, name)) for name in DRAFTERS}


class BuiltInDrafter:
    """vLLM's drafter of a V1 runner, as a stage of a cascade. V1 calls its drafters before the host has the sampled
    tokens, and custom drafters afterwards. The flag `disable_padded_drafter_batch` also moves its drafters there, but
    draft models refuse the flag, so it is hidden from all drafters."""

    def __init__(self, runner: Any, barrier: FaultBarrier):
        self._runner, self._barrier = runner, barrier
        self._cascade: Any = barrier.proposer
        self._guard = guard_of(self._cascade)
        self._num_tokens = runner.speculative_config.built_in_tokens
        self._config = runner.speculative_config
        kind = type(runner.drafter).__name__
        self._runs_by_token = kind in BY_TOKEN and not self._config.parallel_drafting
        self._propose = runner.propose_draft_token_ids  # vLLM's
        # A drafter clamps positions at the end of the target's context, but not at an earlier end of its context.
        end = runner.effective_drafter_max_model_len
        self._max_len = end if end < runner.max_model_len else None
        self._config.disable_padded_drafter_batch = True

    def draft(
        self,
        batch: DraftBatch,
        num_accepted: Int32Array,
        rows: Sequence[int],
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        *step: Any,
    ) -> Offer | None:
        """Drafts for a batch of these rows. Returns None after a failure, or if a request of the batch is too long. The
        cascade chooses the number of tokens for a drafter that runs once per token. `step`: the arguments of
        `propose_draft_token_ids` after the sampled tokens."""
        drafts = scheduler_output.scheduled_spec_decode_tokens.values()
        num_decoded = len(scheduler_output.num_scheduled_tokens) + sum(map(len, drafts))
        has_prompt = scheduler_output.total_num_scheduled_tokens > num_decoded
        num_tokens = self._num_tokens
        if self._runs_by_token:  # a fault of the choice belongs to the cascade, not to the drafter
            choose = partial(self._cascade.offer_length, batch, num_accepted)
            num_tokens = min(self._barrier.guard.call(batch, choose) or 0, num_tokens)
        work = partial(self._draft, num_tokens, rows, has_prompt, scheduler_output, sampled_token_ids, *step)
        return self._guard.call_in_engine(work, is_timed=not has_prompt)

    def _draft(
        self,
        num_tokens: int,
        rows: Sequence[int],
        has_prompt: bool,
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        *step: Any,
    ) -> Offer | None:
        *tensors, common, slot_mappings = step
        if self._max_len is not None and common.max_seq_len + self._runner.num_spec_tokens > self._max_len:
            return None
        start = time.perf_counter()
        width = max(1, *map(len, sampled_token_ids))
        padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens in sampled_token_ids], np.int32)
        scheduler_output = copy.copy(scheduler_output)  # vLLM 0.33 may ask for fewer than K tokens in a step
        scheduler_output.num_spec_tokens_to_schedule = min(num_tokens, scheduler_output.num_spec_tokens_to_schedule)
        with self._as_it_expects(scheduler_output, sampled_token_ids):
            on_device = torch.from_numpy(padded).to(self._runner.device)
            # The drafter writes to the metadata.
            drafts = self._propose(scheduler_output, on_device, *tensors, copy.copy(common), slot_mappings)
        token_ids = drafts.to("cpu", torch.int32).numpy()[rows]
        return Offer(Draft.whole(token_ids), (time.perf_counter() - start) * 1000, has_prompt)

    @contextmanager
    def _as_it_expects(self, scheduler_output: Any, sampled_token_ids: list[list[int]]) -> Iterator[None]:
        """Ends an unfinished prompt with its next token. Otherwise `prepare_next_token_ids_padded` would return the
        prompt's last token as the next one, and EAGLE would put that into its KV cache."""
        batch = self._runner.input_batch
        lengths = batch.num_tokens_no_spec
        true_lengths = lengths.copy()
        for row, tokens in enumerate(sampled_token_ids):
            if not tokens:
                scheduled = scheduler_output.num_scheduled_tokens[batch.req_ids[row]]
                lengths[row] = min(true_lengths[row], batch.num_computed_tokens_cpu[row] + scheduled + 1)
        try:
            with replaced(self._config, {"disable_padded_drafter_batch": False}):
                yield
        finally:
            lengths[:] = true_lengths
