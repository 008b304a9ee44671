"""Model Runner V2: every variant of our kernels that serving can launch, run once before the first request.

Triton compiles a kernel when it first meets types and constants, which would otherwise be in the middle of serving. On
dummy logits that the model's own head makes, as many as a step may have: so what verification allocates is in vLLM's
memory profile. N: requests, K: num_speculative_tokens.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_specplugins.engine.v2.verification.verify import FusedRejectionSampler
from vllm_specplugins.engine.verify import edit_drafted
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
from vllm_specplugins.kernels.rejection.adjust import adjust
from vllm_specplugins.kernels.rejection.arguments import Layout
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.kernels.rejection.step import sample_step


@torch.inference_mode()
def warm_up(runner: Any, speculator: Any, max_num_reqs: int | None = None) -> None:
    """Launches all that the runner's batches may; at most so many requests at once, None: as many as it serves."""
    num_draft, device = runner.num_speculative_steps, runner.device
    num_reqs = min(max_num_reqs or runner.max_num_reqs, max(1, runner.max_num_tokens // (num_draft + 1)))
    config = runner.model_config
    hidden_states = torch.zeros(num_reqs * (num_draft + 1), config.get_hidden_size(), dtype=config.dtype, device=device)
    logits = runner.model.compute_logits(hidden_states)
    if isinstance(runner.rejection_sampler, FusedRejectionSampler):
        _verify(runner.rejection_sampler, logits, speculator.draft_logits, num_reqs, num_draft)
        if runner.speculative_config.runs_target:
            _edit(runner.rejection_sampler, logits[:num_reqs])
    if runner.speculative_config.draws and not speculator.barrier.counters.switched_off:
        first = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        whole, limited = (sampling.at(first) for sampling in _samplings(runner.sampler.sampling_states))
        sampling = limited if runner.speculative_config.draws_as_verified else whole
        for drafted in (logits[:num_reqs], logits[:num_reqs].contiguous()):  # a trained head's have no padding
            coupled_sample(drafted, first, sampling)


def _verify(
    sampler: FusedRejectionSampler,
    logits: torch.Tensor,  # [N * (K + 1), vocab_size]
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
    num_reqs: int,
    num_draft: int,
) -> None:
    """Steps with and without drafts, of edited logits and of the model's own, with limits and without."""
    num_reqs = max(1, min(num_reqs, get_max_chunk_logits(logits.shape[-1]) // (num_draft + 1)))  # vLLM splits others
    for num_tokens in (0, num_draft):
        rows = logits[: num_reqs * (num_tokens + 1)]
        layout = _layout(num_reqs, num_tokens, logits.device)
        edited = adjust(rows, *layout, sampler.editor.edits(), num_tokens)
        operation = sampler.operation if num_tokens else rejection_sample
        for chosen in (edited, rows):
            for sampling in _samplings(sampler.sampler.sampling_states):
                operation(chosen, *layout, sampling, num_tokens, draft_logits if num_tokens else None)
        step = Layout(*layout, layout[2], layout[0][:-1], sampler.sampler.req_states.prefill_len.gpu)
        for sampling in _samplings(sampler.sampler.sampling_states):
            sample_step(rows, step, sampling, num_tokens)


def _edit(sampler: FusedRejectionSampler, logits: torch.Tensor) -> None:
    """What a model proposer does to its logits where a request asks for edits."""
    first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for own in (logits, logits.contiguous()):  # as above
        edit_drafted(first, sampler.editor.edits(), own, first[:, None].int(), first)


def _samplings(states: Any) -> Iterator[Sampling]:
    yield Sampling(states.temperature.gpu, states.seeds.gpu)
    yield Sampling(
        *(array.gpu for array in (states.temperature, states.seeds, states.top_k, states.top_p, states.min_p))
    )


def _layout(num_reqs: int, num_draft: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """cu_num_logits, draft_token_ids, positions, idx_mapping, of the types that V2 has."""
    width = num_draft + 1
    zeros = torch.zeros(num_reqs * width, dtype=torch.int64, device=device)
    bounds = torch.arange(0, num_reqs * width + 1, width, dtype=torch.int32, device=device)
    return bounds, zeros.int(), zeros, torch.arange(num_reqs, device=device)
