"""Model Runner V2: applies vLLM's edits of logits before the temperature; one launch replaces three processors."""

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_specplugins.engine.verify import edit_drafted
from vllm_specplugins.kernels.rejection.adjust import Allowed, BadWords, Bias, Edits, MinTokens, Penalties, adjust

_FUSED = (LogitBiasState, PenaltiesState, BadWordsState)


class LogitsEditor:
    """Applies a sampler's logits processors and thinking budget, and reads the arrays of vLLM's processors."""

    def __init__(self, sampler: Any):
        self._sampler = sampler
        self._fused = [next(p for p in sampler.logits_processors if type(p) is kind) for kind in _FUSED]
        self._bias, self._penalties, self._bad_words = self._fused
        self._others = [processor for processor in sampler.logits_processors if processor not in self._fused]
        self._is_edited = np.zeros(sampler.sampling_states.max_num_reqs, bool)
        self.num_added = 0  # requests so far
        self._watch()

    def _watch(self) -> None:
        """Tracks the requests with edits; vLLM's flag also counts temperatures."""
        add_request = self._sampler.add_request

        def add(req_idx: int, sampling_params: Any) -> None:
            self.num_added += 1
            self._is_edited[req_idx] = False
            add_request(req_idx, sampling_params)

        def watched(add_to_state: Any) -> Any:
            def add_and_look(req_idx: int, sampling_params: Any) -> bool:
                needs_editing: bool = add_to_state(req_idx, sampling_params)
                self._is_edited[req_idx] |= needs_editing
                return needs_editing

            return add_and_look

        self._sampler.add_request = add
        for state in (*self._sampler.logits_processors, self._sampler.thinking_budget_state):
            state.add_request = watched(state.add_request)

    def edits_any(self, idx_mapping_np: np.ndarray) -> bool:
        return bool(self._is_edited[idx_mapping_np].any())

    def edit(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size]
        # cu_num_logits, draft_token_ids, positions, idx_mapping: as for rejection_sample
        layout: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        max_num_draft: int,
        context: LogitsContext,
    ) -> torch.Tensor:
        """Edits logits in vLLM's order, in float32. Returns the same tensor if there is nothing to do."""
        requests = context.idx_mapping_np
        if not self.edits_any(requests):
            return logits
        if self._bias.restore_when_all_masked.np[requests].any():
            # Stop tokens may be allowed early if structured output allows no other token, which only a whole row shows.
            edited = logits.to(torch.float32, copy=True)
            for processor in self._fused:
                edited = processor.apply(edited, context)
        else:
            edited = adjust(logits, *layout, self.edits(), max_num_draft)
        for processor in self._others:
            edited = processor.apply(edited, context)
        self._sampler.thinking_budget_state.apply(edited, context)
        return edited

    def edit_of_drafts(self, idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray) -> Any:
        """`draft.Target.edit` for these request states; None if no request has edits. It ignores other processors and
        thinking budgets."""
        if not self.edits_any(idx_mapping_np):
            return None
        return partial(edit_drafted, idx_mapping, self.edits())

    def edits(self) -> Edits:
        """Returns all arrays of this step, so that only one kernel is compiled."""
        bias, penalties, bad_words = self._bias, self._penalties, self._bad_words
        return Edits(
            Allowed(bias.num_allowed_token_ids.gpu, bias.allowed_token_ids.gpu),
            Bias(bias.num_logit_bias.gpu, bias.logit_bias_token_ids.gpu, bias.logit_bias.gpu),
            MinTokens(bias.num_stop_token_ids.gpu, bias.stop_token_ids.gpu, bias.min_lens.gpu),
            Penalties(
                penalties.repetition_penalty.gpu,
                penalties.frequency_penalty.gpu,
                penalties.presence_penalty.gpu,
                penalties.prompt_bin_mask,
                penalties.output_bin_counts,
            ),
            BadWords(
                bad_words.num_bad_words.gpu,
                bad_words.bad_word_offsets.gpu,
                bad_words.bad_word_token_ids.gpu,
                bad_words.req_states.all_token_ids.gpu,
                bad_words.req_states.prompt_len.gpu,
            ),
        )
