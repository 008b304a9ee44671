"""Adapter for Model Runner V2: the default wherever Triton works.

What reads tokens on the host waits for them (speculators/host.py); the rest drafts on the device (device.py there).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner

from vllm_specplugins.engine.adaptive.conditions import or_planned
from vllm_specplugins.engine.frontend.spec_config import without_built_in
from vllm_specplugins.engine.hooks import both
from vllm_specplugins.engine.v2.adapters import adapters_of, map_all_logits
from vllm_specplugins.engine.v2.feedback.report import REPORT
from vllm_specplugins.engine.v2.forced import put_forced
from vllm_specplugins.engine.v2.speculators.built_in import not_trimmed, rating, run_before
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.speculators.host import HostSpeculator
from vllm_specplugins.engine.v2.verification import verify
from vllm_specplugins.engine.v2.verification.self_check import prepare
from vllm_specplugins.isolation.barrier import FaultBarrier


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Lets a runner be built with our speculator: V2 has a closed list of them."""
    original = model_runner.init_speculator

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculative_config = vllm_config.speculative_config
        kind = HostSpeculator if speculative_config.reads_on_host else DeviceSpeculator
        if speculative_config.built_in is None:
            return kind(vllm_config, device, req_states)
        ours = kind(without_built_in(vllm_config), device, req_states)
        theirs = rating(original, vllm_config, device, req_states)
        return run_before(theirs, ours, vllm_config.num_speculative_tokens)

    model_runner.init_speculator = init_speculator
    try:
        yield
    finally:
        model_runner.init_speculator = original


def attach(runner: Any, barrier: FaultBarrier) -> None:
    """Hands the runner's news of requests to our speculator, and the true draft lengths to its scheduler."""
    speculator = runner.speculator
    if speculator is None:  # a pipeline rank that does not draft
        return
    if hasattr(speculator, "specplugins"):
        runner.initialize_kv_cache = not_trimmed(speculator)(runner.initialize_kv_cache)
        speculator = speculator.specplugins
    speculator.barrier = barrier
    barrier.tally = getattr(speculator, "tally", None)
    add_requests, finish_requests, sample_tokens = runner.add_requests, runner.finish_requests, runner.sample_tokens

    def add(scheduler_output: Any) -> None:
        add_requests(scheduler_output)
        speculator.add(scheduler_output.scheduled_new_reqs)
        put_forced(runner, scheduler_output)

    def finish(scheduler_output: Any) -> None:
        finish_requests(scheduler_output)
        speculator.remove(scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()))

    def sample(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        if hasattr(output, "model_runner_output") and getattr(runner, "adaptive_verification", None) is None:
            setattr(output.model_runner_output, REPORT, speculator.report.num_draft())
        return output

    runner.add_requests, runner.finish_requests, runner.sample_tokens = add, finish, sample
    runner.draft_tokens_handler = speculator.report
    if isinstance(speculator, DeviceSpeculator):
        barrier.acceptance = speculator.tally
        runner.initialize_kv_cache = _trimming_if_it_can(runner)
        asynchronous = runner.vllm_config.scheduler_config.async_scheduling
        speculator.report.trims = lambda: asynchronous and runner.adaptive_verification is not None
    if runner.lora_config is not None:
        map_all_logits(runner)
        if speculator.runs_target:
            speculator.adapters_of = partial(adapters_of, runner)
    speculator.rejection_sampler = lambda: runner.rejection_sampler
    if speculator.runs_target:
        speculator.sampling_states = lambda: runner.sampler.sampling_states
        runner.profile_run = both(runner.profile_run, speculator.compile_exits)
    if runner.speculative_config.plugin_config.common.verification == "fused":
        verify.attach(runner)
    runner.profile_run = both(lambda randomize_inputs=False: prepare(runner, speculator), runner.profile_run)


def _trimming_if_it_can(runner: Any) -> Any:
    """The runner's function that learns which attention backends there are."""
    initialize = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> Any:
        original = model_runner.maybe_create_adaptive_verification_manager
        model_runner.maybe_create_adaptive_verification_manager = or_planned(original, runner)
        try:
            return initialize(*args, **kwargs)
        finally:
            model_runner.maybe_create_adaptive_verification_manager = original

    return initialize_kv_cache
