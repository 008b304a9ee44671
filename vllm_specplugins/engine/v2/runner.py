"""Adapts Model Runner V2, the default if Triton works. A proposer that reads tokens on the host waits for them
(speculators/host.py); other proposers draft on the device (device.py)."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.sample import states

from vllm_specplugins.custom import import_object
from vllm_specplugins.engine.hooks import both, replaced, wrap
from vllm_specplugins.engine.masks import apply_short_masks
from vllm_specplugins.engine.messages import StepFacts, news_of
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.target.layers import map_all_logits
from vllm_specplugins.engine.v2 import learning, memory
from vllm_specplugins.engine.v2.feedback.report import SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators.built_in import with_drafter
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.verification import verify
from vllm_specplugins.engine.v2.verification.self_check import prepare
from vllm_specplugins.engine.verify import verifies

_IN_FLIGHT = 4  # more steps than are scheduled ahead


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Makes vLLM build a runner with the plugin's speculator, since V2 has a fixed list of speculators."""
    apply_short_masks()
    original = model_runner.init_speculator
    kind: Any = import_object(vllm_config.speculative_config.plan.speculator)

    def init_speculator(vllm_config: Any, *arguments: Any) -> Any:
        if vllm_config.speculative_config.built_in is None:
            return kind(vllm_config, *arguments)
        return with_drafter(original, vllm_config, *arguments)

    with replaced(model_runner, {"init_speculator": init_speculator}):
        yield


def is_known(runner: Any) -> bool:
    return isinstance(runner, model_runner.GPUModelRunner)


def aside(runner: Any) -> Any:
    """Returns a context manager for the parts of a step that is vLLM's alone (_sample_tokens)."""
    return nullcontext()


def attach(runner: Any, session: Session) -> None:
    """Connects the plugin's speculator to the runner's requests and steps, and reports actual draft lengths to the
    scheduler."""
    speculator = runner.speculator
    if speculator is None:  # a pipeline rank that does not draft
        return
    if hasattr(speculator, "specplugins"):
        wrap(runner, "initialize_kv_cache", partial(_trimming_as, speculator.specplugins, speculator))
        speculator = speculator.specplugins
    speculator.session, session.tally = session, speculator.tally
    config = runner.speculative_config.plugin_config
    _follow_requests(runner, speculator, session)
    runner.sample_tokens = partial(_sample_tokens, runner, speculator, runner.sample_tokens)
    runner.draft_tokens_handler = speculator.report
    speculator.attach(runner)
    if runner.lora_config is not None:
        map_all_logits(runner)
    if speculator.runs_target:
        learning.attach(runner, speculator)
        # Compiled after the target, before graphs are recorded.
        runner.profile_run = both(runner.profile_run, lambda *_, **__: speculator.first_layers.compile(config))
    if verifies():
        verify.attach(runner)
    runner.profile_run = both(lambda *_, **__: prepare(runner, speculator), runner.profile_run)
    runner.profile_run = both(lambda *_, **__: memory.tell_buffers(runner, speculator), runner.profile_run)


def _follow_requests(runner: Any, speculator: Any, session: Session) -> None:
    """Tells the speculator of each step's new and ended requests, and of the switch."""
    runner.observability_config = observability_config = copy.copy(runner.observability_config)
    wants_graphs = observability_config.cudagraph_metrics
    observability_config.cudagraph_metrics = True  # of each step, for metrics/steps.py
    config = runner.speculative_config.plugin_config

    def add(scheduler_output: Any) -> None:
        slots = runner.req_states.req_id_to_index
        limits = (
            runner.max_model_len,
            speculator.reads_tokens,
            config.length - config.longest_path,
            session.is_warming_up,
        )
        requests = [Request(new, slots[new.req_id], *limits) for new in scheduler_output.scheduled_new_reqs]
        speculator.add(requests)
        for watcher in speculator.watchers:
            watcher.add(requests)

    numpy, add_theirs, finish_theirs = _numpy_apart(), runner.add_requests, runner.finish_requests

    def add_requests(scheduler_output: Any) -> None:
        if scheduler_output.scheduled_new_reqs:
            _with_seeds_apart(numpy, add_theirs, scheduler_output)
            add(scheduler_output)
        else:
            add_theirs(scheduler_output)
        put_forced(runner, scheduler_output)

    def finish_requests(scheduler_output: Any) -> None:
        finish_theirs(scheduler_output)
        speculator.num_off = speculator.num_off + 1 if news_of(scheduler_output).is_off else 0
        observability_config.cudagraph_metrics = wants_graphs or not speculator.num_off
        if scheduler_output.finished_req_ids or scheduler_output.preempted_req_ids:
            gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
            speculator.remove(gone)
            for watcher in speculator.watchers:
                watcher.remove(gone)

    runner.add_requests, runner.finish_requests = add_requests, finish_requests


def _numpy_apart() -> SimpleNamespace:
    """Returns NumPy with a separate random generator. vLLM draws seeds of requests from the global generator, equally
    on each rank, but a call that a guard abandoned on rank 0 may still use that generator."""
    random = np.random.RandomState()
    random.set_state(np.random.get_state())
    return SimpleNamespace(**{**vars(np), "random": random})


def _with_seeds_apart(numpy: SimpleNamespace, add: Any, scheduler_output: Any) -> None:
    with replaced(states, {"np": numpy}):
        add(scheduler_output)


def put_forced(runner: Any, scheduler_output: Any) -> None:
    """Inserts a grammar's forced tokens into the drafts, with a one-hot q, before the step that verifies them."""
    forced, slots_of = news_of(scheduler_output).forced, runner.req_states.req_id_to_index
    if not forced:
        return
    cells = [(slots_of[id_], num + i, token) for id_, num, ids in forced for i, token in enumerate(ids)]
    slots, columns, tokens = async_tensor_h2d(np.array(cells, np.int64), runner.device).unbind(1)
    drafts, draft_logits = runner.req_states.draft_tokens, runner.speculator.draft_logits
    drafts[slots, columns] = tokens.to(drafts.dtype)
    if draft_logits is not None:
        one_hot = draft_logits.new_full((len(cells), draft_logits.shape[-1]), -torch.inf)
        draft_logits[slots, columns] = one_hot.scatter_(1, tokens[:, None], 0.0)


def _sample_tokens(runner: Any, speculator: Any, sample: Any, grammar_output: Any) -> Any:
    """Samples, without a speculator if neither this step nor the last one drafts."""
    step = runner.execute_model_state
    rests = step is not None and _is_aside(speculator, step.input_batch)
    if step is not None and not rests:
        rests = speculator.rests(step.input_batch, step.num_spec_tokens_to_schedule)
        speculator.note(step.input_batch, step.num_spec_tokens_to_schedule, rests)
    if rests:
        for watcher in speculator.watchers:
            ends = step.input_batch.query_start_loc[1 : step.input_batch.num_reqs + 1]
            watcher.on_step(step.input_batch, step.hidden_states, ends - 1)
        with replaced(runner, {"speculator": None, "num_speculative_steps": 0}):
            return _noted(speculator, sample(grammar_output))
    output = _noted(speculator, sample(grammar_output))
    if hasattr(output, "model_runner_output"):
        session = speculator.session
        num_verified = None if session.budget is None else session.budget.num_verified
        session.facts = StepFacts(speculator.report.num_draft(), num_verified)
    return output


def _is_aside(speculator: Any, input_batch: Any) -> bool:
    """Whether drafting has been off for so long that no step in flight drafted, and nothing reads the step."""
    if input_batch.has_prefill or input_batch.num_draft_tokens:
        speculator.num_off = min(speculator.num_off, 1)  # this step writes probabilities, which the next ones overwrite
    return speculator.num_off > _IN_FLIGHT and not (speculator.reads_tokens or speculator.watchers)


def _noted(speculator: Any, output: Any) -> Any:
    if speculator.session.is_warming_up:
        return output
    watchers = speculator.watchers if speculator.late is None else [speculator.late, *speculator.watchers]
    if watchers and hasattr(output, "model_runner_output"):
        for watcher in watchers:
            watcher.note(SampledTokens.of(output))
    return output


def _trimming_as(ours: Any, theirs: Any, initialize: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the plugin's speculator answer when the runner asks vLLM's speculator whether drafts are trimmed."""
    trims = isinstance(ours, DeviceSpeculator) and ours.enable_adaptive_verification
    with replaced(theirs, {"enable_adaptive_verification": trims}):
        return initialize(*args, **kwargs)
