"""Model Runner V2: checks our kernels on a device before they serve (kernels/self_check.py), and warms them up. Where a
kernel differs from its reference or does not compile, vLLM takes over: its verification supports all parameters, and a
draft that needs a q is empty."""

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
_REMEDIES = {
    "noise": "drafting is switched off",
    "lookup": "its reference looks up, which is slower",
    "rows": "its reference counts drafts, which is slower",
    "acceptance": "its reference rates drafts, which is slower",
    "trees": "drafts are chains",
    "budget": "its reference shares out what is verified, which is slower",
}


@torch.inference_mode()
def prepare(runner: Any, speculator: Any) -> None:
    """Checks the kernels before vLLM's profile run uses them, replaces those that fail, and warms the others."""
    if self_check.device() is None:
        return
    findings = (
        [] if self_check.value() == "0" else list(check_device(runner.device, self_check.shapes_of(runner.vllm_config)))
    )
    _replace(findings, runner, speculator)
    try:
        warm_up(runner, speculator)
        findings = []
    except Exception as error:  # of a variant that the check did not meet
        findings = [Finding("verification, warmed", problem_of(error))]
    _replace(findings, runner, speculator)


def _replace(findings: list[Finding], runner: Any, speculator: Any) -> None:
    failed = _agreed({_reported(finding) for finding in findings if finding.problem})
    if failed & {"verification", "edits"}:
        verify_as_vllm(runner)
    if "verification" in failed:
        speculator.verified = None  # "coupled" drafts are greedy then
    if failed & {"verification", "edits", "trees"} and hasattr(speculator, "trees"):
        speculator.trees.stop(runner.rejection_sampler)
    if "noise" in failed or ("verification" in failed and speculator.draft_logits is not None):
        stop_drafting(speculator)
    if "lookup" in failed and speculator.lookups.texts is not None:
        speculator.lookups.texts.implementation = "reference"
    if "acceptance" in failed:
        speculator.outcomes.implementation = "reference"
    if "rows" in failed and hasattr(speculator, "limits"):
        speculator.limits.implementation = speculator.tally.implementation = "reference"
        speculator.rows_implementation = "reference"
    if "budget" in failed:
        speculator.budget_implementation = "reference"


def verify_as_vllm(runner: Any) -> None:
    """Undoes verify.attach: vLLM verifies and edits logits."""
    if isinstance(runner.rejection_sampler, FusedRejectionSampler):
        runner.sampler.__class__ = Sampler
        runner.rejection_sampler = RejectionSampler(runner.sampler, runner.speculative_config, runner.device)


def stop_drafting(speculator: Any) -> None:
    """Drafts nothing: planned tokens are 0, with a one-hot q."""
    speculator.barrier.counters.switched_off = True
    speculator.draft_logits.fill_(-torch.inf)
    speculator.draft_logits[..., 0] = 0.0

    def propose(input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        speculator.report.tell_none(input_batch.req_ids)
        return speculator.draft_tokens[: input_batch.num_reqs].zero_()  # vLLM 0.33 writes -1 into it

    speculator.propose = propose
    speculator.init_cudagraph_manager = lambda cudagraph_mode: None


def _reported(finding: Finding) -> str:
    kind = finding.name.split(",")[0]
    remedy = _REMEDIES.get(kind, "vLLM verifies")
    logger.warning("Self-check of %s: it %s; %s.", finding.name, finding.problem, remedy)
    return kind


def _agreed(failed: set[str]) -> set[str]:
    """The kinds that failed on any rank, since all ranks must verify alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return failed
    of_ranks: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(of_ranks, failed, group=group.cpu_group)
    return set().union(*of_ranks)
