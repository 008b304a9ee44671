"""Adapter for Model Runner V2: the default wherever Triton works.

A proposer that runs on the host waits for the sampled tokens; one that only runs the target waits for nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_specplugins.draft import DraftBatch, Feedback, Int32Array
from vllm_specplugins.engine.adaptive import or_planned
from vllm_specplugins.engine.hooks import both
from vllm_specplugins.engine.spec_config import without_built_in
from vllm_specplugins.engine.v2 import verify
from vllm_specplugins.engine.v2.adapters import adapters_of, map_all_logits
from vllm_specplugins.engine.v2.built_in import DeviceOffer, not_trimmed, rating, run_before
from vllm_specplugins.engine.v2.history import Histories
from vllm_specplugins.engine.v2.lookup import LookupSpeculator
from vllm_specplugins.engine.v2.on_device import DeviceSpeculator
from vllm_specplugins.engine.v2.report import REPORT, DraftReport, warms_up
from vllm_specplugins.engine.v2.self_check import prepare
from vllm_specplugins.engine.v2.target import TargetSpeculator
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.read_only import Views
from vllm_specplugins.request_options import draft_limit


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Lets a runner be built with our speculator: V2 has a closed list of them."""
    original = model_runner.init_speculator

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> BaseSpeculator:
        speculative_config = vllm_config.speculative_config
        kind: Any = TargetSpeculator if speculative_config.runs_target else HostSpeculator
        if speculative_config.drafts_on_device:
            kind = DeviceSpeculator if speculative_config.runs_target else LookupSpeculator
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
    if not runner.speculative_config.reads_on_host:
        barrier.tally = barrier.acceptance = speculator.tally
    add_requests, finish_requests, sample_tokens = runner.add_requests, runner.finish_requests, runner.sample_tokens

    def add(scheduler_output: Any) -> None:
        add_requests(scheduler_output)
        speculator.add(scheduler_output.scheduled_new_reqs)

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
    if isinstance(speculator, LookupSpeculator | DeviceSpeculator):
        runner.initialize_kv_cache = _trimming_if_it_can(runner)
        asynchronous = runner.vllm_config.scheduler_config.async_scheduling
        speculator.report.trims = lambda: asynchronous and runner.adaptive_verification is not None
    if runner.lora_config is not None:
        map_all_logits(runner)
        if isinstance(speculator, TargetSpeculator):
            speculator.adapters_of = partial(adapters_of, runner)
    if isinstance(speculator, TargetSpeculator | HostSpeculator):
        speculator.rejection_sampler = lambda: runner.rejection_sampler
    if isinstance(speculator, TargetSpeculator):
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


class HostSpeculator(BaseSpeculator):
    """Runs a proposer on the host.

    Under tensor parallelism rank 0 drafts and the others receive its tokens, so that a time-out on one rank
    cannot make the ranks verify different drafts.
    """

    supports_mm_inputs = False
    draft_logits = None
    barrier: FaultBarrier  # set by `attach`
    offer: DeviceOffer | None = None  # of a cascade's stage that is built into vLLM
    rejection_sampler: Callable[[], Any]  # the runner's; set by `attach`

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: Any):
        self.device = device
        self._model_config = vllm_config.model_config  # vLLM may fit max_model_len to the memory later
        self._max_num_draft = vllm_config.num_speculative_tokens
        self._histories = Histories(req_states, self._model_config.max_model_len, self._max_num_draft, device)
        self.report = DraftReport()
        self._drafted_at = 0.0  # when the last drafting ended
        self._draft_tokens = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, self._max_num_draft, dtype=torch.int64, device=device
        )

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing to capture."""

    def capture(self) -> None:
        """Nothing to capture."""

    def add(self, new_requests: Any) -> None:
        """Starts the histories of requests that are new, or back after a preemption."""
        self._histories.add(new_requests)

    def remove(self, request_ids: set[str]) -> None:
        """Drops requests that finished, were aborted or were preempted."""
        self._histories.remove(request_ids)
        if request_ids:
            self.barrier.forget(sorted(request_ids))

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # [num_reqs]
        num_rejected: torch.Tensor,  # [num_reqs]
        last_sampled: Any,
        next_prefill_tokens: Any,
        temperature: Any,
        seeds: Any,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """vLLM's signature; returns [num_reqs, K] int64, padded with 0, which is a token that can be verified."""
        drafts = self._draft_tokens[: input_batch.num_reqs]
        if dummy_run or warms_up(input_batch.req_ids):
            return drafts
        group = get_tp_group()
        if group.rank_in_group == 0:
            most = self._max_num_draft if num_speculative_tokens is None else num_speculative_tokens
            with gpu_sync_allowed():
                drafts.copy_(torch.from_numpy(self._propose(input_batch, num_sampled, num_rejected, most)))
        if group.world_size > 1:
            group.broadcast(drafts, src=0)
        return drafts

    def _propose(
        self, input_batch: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, most: int
    ) -> Int32Array:
        rows, accepted, rejected = self._histories.extend(input_batch, num_sampled, num_rejected)
        request_ids = [input_batch.req_ids[row] for row in rows]
        requests = [self._histories[request_id] for request_id in request_ids]
        limits = [
            draft_limit(request.options, request.num_tokens, most, self._model_config.max_model_len)
            for request in requests
        ]
        batch = DraftBatch(
            request_ids=request_ids,
            token_ids=Views(request.token_ids for request in requests),
            max_num_draft=np.array(limits, np.int32),
            options=[request.options for request in requests],
            offer=None if self.offer is None else self.offer.of(rows),
            likeliest=verify.likeliest_of(
                self.rejection_sampler(), input_batch, {row: place for place, row in enumerate(rows)}
            ),
        )
        # Behind the offer, which was waited for: what the stage built into vLLM takes is part of the step's time.
        step_ms = (time.perf_counter() - self._drafted_at) * 1000
        num_verified = int((1 + accepted + rejected).sum())
        only_decoded = len(rows) == input_batch.num_reqs and input_batch.num_tokens == num_verified
        feedback = Feedback(request_ids, accepted + rejected, accepted, step_ms if only_decoded else None)
        draft = self.barrier.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        padded = np.zeros((input_batch.num_reqs, self._max_num_draft), np.int32)
        drafts: list[list[int]] = [[] for _ in input_batch.req_ids]
        for row, tokens, count in zip(rows, draft.token_ids, draft.num_draft, strict=True):
            padded[row, :count] = tokens[:count]
            drafts[row] = tokens[:count].tolist()
        self.report.tell(input_batch.req_ids, drafts)
        return padded
