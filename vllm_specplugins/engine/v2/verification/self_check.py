"""Model Runner V2: checks the plugin's kernels on a device before serving (kernels/self_check.py), and warms them up.
If a kernel differs from its reference or does not run on any rank, vLLM samples, and drafting ends. N: requests, K:
num_speculative_tokens."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, get_max_chunk_logits

from vllm_specplugins.engine import self_check
from vllm_specplugins.engine.v2.verification.verify import FusedRejectionSampler
from vllm_specplugins.engine.verify import EDITED_ROWS, edit_drafted
from vllm_specplugins.kernels.rejection import Layout, Sampling, rejection_sample, sample_step
from vllm_specplugins.kernels.rejection.adjust import adjust
from vllm_specplugins.kernels.rejection.drafts import coupled_sample
from vllm_specplugins.kernels.self_check import Finding, check_device, problem_of

logger = init_logger(__name__)


@torch.inference_mode()
def prepare(runner: Any, speculator: Any) -> None:
    """Checks the kernels before vLLM's profile run uses them, then warms up each variant."""
    if self_check.device() is None:
        return
    for findings in (_check, _warm):
        if _is_any(_has_problem(findings(runner, speculator))):
            speculator.stop()
            if isinstance(runner.rejection_sampler, FusedRejectionSampler):
                runner.sampler.__class__ = Sampler
                runner.rejection_sampler = RejectionSampler(runner.sampler, runner.speculative_config, runner.device)
            return


def _check(runner: Any, speculator: Any) -> Iterator[Finding]:
    if self_check.value() != "0":
        yield from check_device(runner.device, self_check.shapes_of(runner.vllm_config))


def _warm(runner: Any, speculator: Any) -> Iterator[Finding]:
    try:
        warm_up(runner, speculator)
    except Exception as error:  # a variant that the check did not cover may fail
        yield Finding("verification, warmed", problem_of(error))


def _has_problem(findings: Iterator[Finding]) -> bool:
    problems = [finding for finding in findings if finding.problem]
    for found in problems:
        words = "Self-check: the kernel %s %s. The server runs without drafts, and vLLM samples.%s"
        logger.warning(words, found.name, found.problem, found.advice)
    return bool(problems)


def _is_any(has_problem: bool) -> bool:
    """Returns whether the flag is set on any rank, since all ranks must verify alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return has_problem
    of_ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(of_ranks, has_problem, group=group.cpu_group)
    return any(of_ranks)


@torch.inference_mode()
def warm_up(runner: Any, speculator: Any) -> None:
    """Runs every variant of the plugin's kernels that serving can launch, since Triton compiles a kernel at its first
    launch with new types and constants. The dummy logits come from the model's head and have the largest number of rows
    of a step (with trimming, the number that vLLM verifies at once), so vLLM's memory profile includes verification."""
    num_draft, device = runner.num_speculative_steps, runner.device
    num_reqs = min(runner.max_num_reqs, max(1, runner.max_num_tokens // (num_draft + 1)))
    config, num_rows = runner.model_config, num_reqs * (num_draft + 1)
    if speculator.enable_adaptive_verification:
        num_rows = min(num_rows, max(num_reqs, get_max_chunk_logits(runner.vocab_size)))
    hidden_states = torch.zeros(num_rows, config.get_hidden_size(), dtype=config.dtype, device=device)
    logits = runner.model.compute_logits(hidden_states)
    first, states = torch.zeros(num_reqs, dtype=torch.int64, device=device), runner.sampler.sampling_states
    limits = (getattr(states, name).gpu for name in ("temperature", "seeds", "top_k", "top_p", "min_p"))
    sampling = Sampling(*limits)  # an absent limit is not a separate variant
    drafted = logits[:num_reqs], logits[:num_reqs].contiguous()  # logits of a trained head have no padding
    if isinstance(runner.rejection_sampler, FusedRejectionSampler):
        _verify(runner.rejection_sampler, logits, speculator.draft_logits, sampling, num_reqs, num_draft)
        if runner.speculative_config.runs_target:  # a model proposer applies edits for requests that set them
            for rows in drafted:
                edit_drafted(first, runner.rejection_sampler.editor.edits(), rows, first[:, None].int(), first)
    if runner.speculative_config.draws:
        for rows in drafted:
            coupled_sample(rows, first, sampling.at(first))


def _verify(
    sampler: FusedRejectionSampler,
    logits: torch.Tensor,  # [N * (K + 1), vocab_size]
    draft_logits: torch.Tensor | None,  # [max_num_reqs, K, vocab_size]
    sampling: Sampling,
    num_reqs: int,
    num_draft: int,
) -> None:
    num_reqs = max(1, min(num_reqs, get_max_chunk_logits(logits.shape[-1]) // (num_draft + 1)))  # vLLM splits others
    for num_tokens, is_edited in itertools.product((0, num_draft), (True, False)):
        width = num_tokens + 1
        num_own = min(num_reqs, max(1, EDITED_ROWS // width)) if is_edited else num_reqs
        rows = logits[: num_own * width]
        places = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
        bounds = torch.arange(0, len(rows) + 1, width, dtype=torch.int32, device=logits.device)
        layout = bounds, places.int(), places, torch.arange(num_own, device=logits.device)  # of V2's types
        chosen = adjust(rows, *layout, sampler.editor.edits(), num_tokens) if is_edited else rows
        operation = None
        if num_tokens:
            nodes = torch.arange(width, device=logits.device).repeat(num_own)
            operation = sampler.operation(layout[3].repeat_interleave(width), nodes)
        verify = operation or rejection_sample
        verify(chosen, *layout, sampling, num_tokens, draft_logits if num_tokens else None)
        step = Layout(*layout, places, bounds[:-1], sampler.sampler.req_states.prefill_len.gpu)
        sample_step(rows, step, sampling, num_tokens, operation=operation)
