"""A proposer built into vLLM, as a stage of a cascade on Model Runner V1: it is run at every step.

What it does in a step runs over all tokens of that step, so that its KV cache holds every token that the target's
does, whoever drafted them.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker import gpu_model_runner

from vllm_specplugins.draft import Offer
from vllm_specplugins.engine.frontend.spec_config import for_built_in
from vllm_specplugins.engine.hooks import replaced

DRAFTERS = ("DFlashProposer", "DraftModelProposer", "EagleProposer", "Gemma4Proposer", "Step3p5MTPProposer")
BY_TOKEN = ("DraftModelProposer", "EagleProposer")  # which take in tokens and draft none where none are wanted


def narrowed() -> dict[str, Any]:
    """What makes a runner's drafter, with the K of that stage; all else is for the cascade's."""

    def narrow(kind: Any) -> Any:
        return lambda vllm_config, device, runner: kind(for_built_in(vllm_config), device, runner)

    return {name: narrow(getattr(gpu_model_runner, name)) for name in DRAFTERS}


class BuiltInDrafter:
    """vLLM's own drafter of a V1 runner.

    V1 asks its own drafters before it knows the sampled tokens on the host, and custom ones after that. With this flag
    of the configuration it does the latter, too; the drafter never sees the flag, which draft models refuse.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._most = runner.speculative_config.built_in_tokens
        self._config = runner.speculative_config
        kind = type(runner.drafter).__name__
        self._runs_by_token = kind in BY_TOKEN and not self._config.parallel_drafting
        self._propose = runner.propose_draft_token_ids  # vLLM's own, bound
        # A drafter clamps positions at the end of the target's context, but not at an earlier end of its own.
        own_end = runner.effective_drafter_max_model_len
        self._longest = own_end if own_end < runner.max_model_len else None
        self._config.disable_padded_drafter_batch = True

    def offer(
        self,
        is_needed: Callable[[], bool],
        rows: Sequence[int],
        scheduler_output: Any,
        sampled_token_ids: list[list[int]],
        *step: Any,
    ) -> Offer | None:
        """Its drafts for these rows; None where some request of the batch is too long for it.

        Where they are not needed it only takes in the step's tokens, if it is one that runs once for each draft token.
        `step` is what `propose_draft_token_ids` gets after the sampled tokens.
        """
        *tensors, common, slot_mappings = step
        if self._longest is not None and common.max_seq_len + self._runner.num_spec_tokens > self._longest:
            return None
        most = 0 if self._runs_by_token and not is_needed() else self._most
        start = time.perf_counter()
        width = max(1, *map(len, sampled_token_ids))
        padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens in sampled_token_ids], np.int32)
        scheduler_output = copy.copy(scheduler_output)  # vLLM 0.33 may want fewer than K in a step
        scheduler_output.num_spec_tokens_to_schedule = min(most, scheduler_output.num_spec_tokens_to_schedule)
        with self._as_it_expects(scheduler_output, sampled_token_ids):
            # The metadata are changed.
            on_device = torch.from_numpy(padded).to(self._runner.device)
            drafts = self._propose(scheduler_output, on_device, *tensors, copy.copy(common), slot_mappings)
        token_ids = drafts.to("cpu", torch.int32).numpy()[rows]
        return Offer(token_ids, (time.perf_counter() - start) * 1000)

    @contextmanager
    def _as_it_expects(self, scheduler_output: Any, sampled_token_ids: list[list[int]]) -> Iterator[None]:
        """For a request in the middle of its prompt `prepare_next_token_ids_padded` takes the prompt's last token for
        the next one, which EAGLE would keep in its KV cache: let its last token be the next one."""
        batch = self._runner.input_batch
        lengths = batch.num_tokens_no_spec
        kept = lengths.copy()
        for row, tokens in enumerate(sampled_token_ids):
            if not tokens:
                scheduled = scheduler_output.num_scheduled_tokens[batch.req_ids[row]]
                lengths[row] = min(kept[row], batch.num_computed_tokens_cpu[row] + scheduled + 1)
        try:
            with replaced(self._config, {"disable_padded_drafter_batch": False}):
                yield
        finally:
            lengths[:] = kept
