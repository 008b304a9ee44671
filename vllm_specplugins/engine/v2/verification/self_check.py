"""Model Runner V2: checks our kernels on a device before they serve (kernels/self_check.py), and warms them up. If a
kernel differs from its reference or does not run, on any rank, then vLLM samples, and nothing is drafted."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_specplugins.engine import self_check
from vllm_specplugins.engine.v2.verification.verify import FusedRejectionSampler
from vllm_specplugins.engine.v2.verification.warm_up import warm_up
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
    except Exception as error:  # of a variant that the check did not meet
        yield Finding("verification, warmed", problem_of(error))


def _has_problem(findings: Iterator[Finding]) -> bool:
    problems = [finding for finding in findings if finding.problem]
    for name, problem in problems:
        logger.warning("Self-check of %s: it %s; vLLM samples, and nothing is drafted.", name, problem)
    return bool(problems)


def _is_any(has_problem: bool) -> bool:
    """Whether this holds on any rank, since all ranks must verify alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return has_problem
    of_ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(of_ranks, has_problem, group=group.cpu_group)
    return any(of_ranks)
