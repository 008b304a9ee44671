"""Model Runner V2: samples and verifies with kernels/rejection, inside vLLM's samplers. The operation applies
temperature, top-k, top-p and min-p; edits.py edits logits before the temperature. If the operation covers all
parameters of a batch, the step is plain: it reads the runner's logits, tokens and positions in two launches, with or
without drafts."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, _flatten_sampled_kernel

from vllm_specplugins.engine.hooks import replaced, wrap
from vllm_specplugins.engine.v2.verification.edits import LogitsEditor
from vllm_specplugins.engine.verify import EDITED_ROWS
from vllm_specplugins.kernels.rejection import Layout, Sampling, rejection_sample, sample_step

# Of a step, in the order of vLLM's apply_sampling_params: expanded_idx_mapping, idx_mapping, idx_mapping_np, pos,
# input_ids, expanded_local_pos, seq_lens_upper_bound_np.
_Batch = tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]


def attach(runner: Any) -> None:
    """Installs the plugin's verification in vLLM's hook `ModelState.custom_sampler`, when the runner loads its
    model."""
    original = model_runner.init_model_state

    def load(load_model: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(model_runner, {"init_model_state": init_model_state}):
            return load_model(*args, **kwargs)

    def init_model_state(*args: Any) -> Any:
        state = original(*args)
        wrap(state, "custom_sampler", ours)
        return state

    def ours(custom_sampler: Any, sampler: Any) -> Any:
        theirs = custom_sampler(sampler)
        if theirs is not None or runner.vllm_config.watermark_config is not None:
            return theirs
        verifies = FusedRejectionSampler(sampler, runner.speculative_config, runner.device)
        verifies.verify_drafts = getattr(runner.speculator, "verify_drafts", None)
        return sampler, verifies

    wrap(runner, "load_model", load)


class FusedSampler(Sampler):
    """vLLM's sampler for steps without drafts, with the same operation, so that a seed has the same effect in all
    steps."""

    rejection: "FusedRejectionSampler"

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
        return self.rejection.plain(logits, input_batch, 0) or super().__call__(logits, input_batch)

    def sample(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rejection.sample(*args, **kwargs)


class FusedRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with the plugin's operation, which the sampler of steps without drafts shares."""

    # The speculator's operation in place of rejection_sample, for slots and draft positions of rows; None: none.
    verify_drafts: Callable[..., Any] | None = None

    def __init__(self, sampler: Any, spec_config: Any, device: torch.device):
        super().__init__(sampler, spec_config, device)
        self.editor = LogitsEditor(sampler)
        self._idx_mapping_np = np.zeros(0, np.int32)
        self._expanded_idx_mapping: torch.Tensor | None = None
        self._is_ever_plain = not (sampler.compute_nans or sampler.trace_replay_state or sampler.return_sampling_mask)
        self._batch: tuple[int, list[str]] = 0, []  # the last batch for which `_plain` is known
        self._plain: Sampling | None = None  # its parameters, if it is plain
        sampler.__class__, sampler.rejection = FusedSampler, self  # others refer to this object, so its class changes

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None
    ) -> Any:
        if draft_logits is None and invalid_drafts is None:
            output = self.plain(logits, input_batch, self.num_speculative_steps)
            if output is not None:
                return output
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def operation(self, slots: torch.Tensor, places: torch.Tensor) -> Callable[..., Any] | None:
        """Returns the speculator's operation for rows of these slots and draft positions; None: `rejection_sample`."""
        return None if self.verify_drafts is None else partial(self.verify_drafts, slots, places)

    def plain(self, logits: torch.Tensor, input_batch: Any, max_num_draft: int) -> SamplerOutput | None:
        batch = self.editor.num_added, input_batch.req_ids
        if batch != self._batch:
            self._batch, self._plain = batch, self._plain_sampling(input_batch.idx_mapping_np)
        if self._plain is None:
            return None
        layout = Layout(
            input_batch.cu_num_logits, input_batch.input_ids, input_batch.positions, input_batch.idx_mapping,
            input_batch.logits_indices, input_batch.seq_lens, self.sampler.req_states.prefill_len.gpu,
        )  # fmt: skip
        operation = None
        if max_num_draft and self.verify_drafts is not None:
            operation = self.operation(input_batch.expanded_idx_mapping, input_batch.expanded_local_pos)
        sampled, num_sampled, num_rejected = sample_step(
            logits, layout, self._plain, max_num_draft, operation=operation
        )
        return SamplerOutput(
            sampled_token_ids=sampled, logprobs_tensors=None, num_nans=None, num_sampled=num_sampled,
            num_rejected=num_rejected, sampling_mask_tensors=None,
        )  # fmt: skip

    def _plain_sampling(self, idx_mapping_np: np.ndarray) -> Sampling | None:
        """Returns the parameters of a plain step, which depend only on the requests; None for other steps."""
        asks = self.editor.edits_any(idx_mapping_np) or self.sampler.get_logprobs_dims(idx_mapping_np) is not None
        return self._sampling(idx_mapping_np) if self._is_ever_plain and not asks else None

    def was_plain(self, input_batch: Any) -> bool:
        return self._plain is not None and self._batch == (self.editor.num_added, input_batch.req_ids)

    def _sampling(self, idx_mapping_np: np.ndarray) -> Sampling:
        states = self.sampler.sampling_states
        top_k, top_p, min_p = (tensor.np[idx_mapping_np] for tensor in (states.top_k, states.top_p, states.min_p))
        return Sampling(
            states.temperature.gpu,
            states.seeds.gpu,
            states.top_k.gpu if (top_k != states.vocab_size).any() else None,
            states.top_p.gpu if (top_p != 1.0).any() else None,
            states.min_p.gpu if (min_p != 0.0).any() else None,
        )

    def _run(
        self,
        operation: Callable[..., Any],
        logits: torch.Tensor,  # [num_logits, vocab_size]
        layout: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],  # as for rejection_sample
        batch: _Batch,
        max_num_draft: int,
        draft_logits: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sampler, (expanded, idx_mapping, requests, pos, input_ids, local_pos, seq_lens) = self.sampler, batch
        context = LogitsContext(expanded, idx_mapping, requests, local_pos, input_ids, pos, seq_lens)
        edited = self.editor.edit(logits, layout, max_num_draft, context)
        sampled, num_sampled = operation(edited, *layout, self._sampling(requests), max_num_draft, draft_logits)
        asked = sampler.get_logprobs_dims(requests) is not None and sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        if asked or sampler.return_sampling_mask:  # vLLM returns logits after all sampling parameters
            edited = sampler.apply_sampling_params(logits, *batch)
        return edited, sampled, num_sampled

    def sample(
        self, logits: torch.Tensor, *batch: Any, return_logprobs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        idx_mapping, _, _, pos, input_ids, *_ = batch
        rows = torch.arange(len(logits) + 1, dtype=torch.int32, device=logits.device)
        layout = rows, input_ids, pos + 1, idx_mapping
        edited, sampled, _ = self._run(rejection_sample, logits, layout, batch, 0)
        return sampled[:, 0], edited

    def _verify(
        self,
        logits: torch.Tensor,  # [num_logits, vocab_size]
        draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
        draft_sampled: torch.Tensor,  # [num_logits]
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._idx_mapping_np, self._expanded_idx_mapping = idx_mapping_np, expanded_idx_mapping
        batch = (
            expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled, expanded_local_pos,
            seq_lens_upper_bound_np,
        )  # fmt: skip
        layout = cu_num_logits, verify_draft_sampled, pos + 1, idx_mapping
        operation = self.operation(expanded_idx_mapping, expanded_local_pos) or rejection_sample
        return self._run(operation, logits, layout, batch, self.num_speculative_steps, draft_logits)

    def _verify_in_chunks(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.enable_adaptive_verification or not self.editor.edits_any(input_batch.idx_mapping_np):
            return super()._verify_in_chunks(logits, input_batch, *args, **kwargs)
        draft_logits, draft_sampled, pos, max_rows, *rest = args
        args = draft_logits, draft_sampled, pos, min(max_rows, EDITED_ROWS), *rest
        return super()._verify_in_chunks(logits, input_batch, *args, **kwargs)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> Any:
        """Supports `logprob_token_ids`, which vLLM ignores in steps with drafts."""
        state = self.sampler.logprob_token_ids_state
        num_token_ids = state.max_num_token_ids(self._idx_mapping_np)
        num_reqs, num_logits = len(num_sampled), len(logits)
        if num_token_ids == 0:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        flat_sampled = torch.zeros(num_logits, dtype=sampled.dtype, device=sampled.device)
        _flatten_sampled_kernel[(num_reqs,)](flat_sampled, sampled, sampled.stride(0), num_sampled, cu_num_logits)
        boundaries: list[int] | torch.Tensor | None = None
        if num_logits != num_reqs:
            # If the device trims drafts, the host knows only the scheduled lengths.
            trims = self.enable_adaptive_verification
            boundaries = cu_num_logits.clone() if trims else cu_num_logits_np.tolist()
        return compute_topk_scores(
            logits,
            0 if max_num_logprobs == NO_LOGPROBS else max_num_logprobs,
            flat_sampled,
            boundaries,
            logprob_token_ids_state=state,
            expanded_idx_mapping=self._expanded_idx_mapping,
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
