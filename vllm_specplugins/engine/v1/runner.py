"""Adapts Model Runner V1, which runs on CPU-only installations. V1 gives custom proposers only token ids, so this
module replaces `propose_draft_token_ids` of one runner object."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample import rejection_sampler
from vllm.v1.structured_output import utils
from vllm.v1.worker import gpu_model_runner

from vllm_specplugins.draft import DraftBatch, Feedback
from vllm_specplugins.engine.frontend.options import RequestLimits
from vllm_specplugins.engine.hooks import both, replaced, wrap
from vllm_specplugins.engine.messages import NEVER, news_of
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.target.layers import FirstLayers
from vllm_specplugins.engine.v1 import built_in
from vllm_specplugins.engine.v1.edits import edit_of_drafts
from vllm_specplugins.engine.v1.learning import Readings
from vllm_specplugins.engine.v1.rows import metadata_of
from vllm_specplugins.engine.v1.target import target_of
from vllm_specplugins.engine.v1.verify import Verifier, all_logits_processors, expand_batch_to_tokens
from vllm_specplugins.engine.verify import verifies
from vllm_specplugins.kernels.rejection import host
from vllm_specplugins.structures.arrays import Views, view
from vllm_specplugins.target import Target


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Makes V1 build a runner with the plugin's proposer as `custom_class`, unless the runner has a drafter of vLLM."""
    names = built_in.narrowed()
    if vllm_config.speculative_config.built_in is None:
        vllm_config.speculative_config.method = "custom_class"
        names = {"create_custom_proposer": lambda vllm_config: SimpleNamespace(load_model=lambda model: None)}
    with all_logits_processors(vllm_config), replaced(gpu_model_runner, names):
        yield


def is_known(runner: Any) -> bool:
    return isinstance(runner, gpu_model_runner.GPUModelRunner)


def attach(runner: Any, session: Session) -> None:
    if not hasattr(runner, "drafter"):  # a pipeline rank that does not draft
        return
    adapter = _Adapter(runner, session)
    runner.drafter.adapter = adapter
    runner.propose_draft_token_ids = adapter.propose_draft_token_ids
    wrap(runner, "_update_states", adapter.update_states)
    if runner.speculative_config.runs_target:
        runner.drafter.load_model = both(runner.drafter.load_model, adapter.load_model)
        runner.profile_run = both(runner.profile_run, adapter.compile_exits)
    draft_to_the_end(runner)
    runner.update_max_model_len = both(runner.update_max_model_len, lambda max_model_len: draft_to_the_end(runner))
    if runner.device.type == "cpu":
        wrap(runner, "sample_tokens", _with_fast_masks)
    if verifies():
        adapter.verifier = Verifier(runner, adapter.seed, session)
        runner._sample = adapter.verifier.sample
        wrap(runner, "_calc_spec_decode_metadata", partial(metadata_of, runner.device))
    elif runner.device.type == "cpu":
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _with_fast_masks(sample: Any, grammar_output: Any) -> Any:
    """Applies masks of structured output with a compiled loop: on a CPU, xgrammar takes 0.5 ms for a row that forbids
    most of a vocabulary of 152k, and each draft token has a row."""
    with replaced(utils, {"xgr": SimpleNamespace(apply_token_bitmask_inplace=_forbid)}):
        return sample(grammar_output)


def _forbid(logits: torch.Tensor, masks: torch.Tensor, indices: Any) -> None:
    """Applies one row of a mask per row of logits; vLLM fills the rows without a mask."""
    host.forbid(logits.numpy(), masks.numpy())


def aside(runner: Any) -> Any:
    """Returns a context manager for the parts of a step that is vLLM's alone, which then prepares no drafts. A hybrid
    model keeps its states where drafts would write them."""
    return nullcontext() if runner.model_config.is_hybrid else replaced(runner, {"speculative_config": None})


def draft_to_the_end(runner: Any) -> None:
    """Raises the length beyond which V1 drafts zeros for the whole batch (V1 lowers it if memory is short, with
    `--max-model-len auto`). Drafts are shortened at a request's end instead."""
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1


@dataclass(frozen=True, slots=True)
class _Request:
    limits: RequestLimits
    seed: int


class _Adapter:
    verifier: Verifier | None = None  # None: vLLM's
    first_layers: FirstLayers | None = None  # layers of the target, for a model proposer

    def __init__(self, runner: Any, session: Session):
        self._runner, self._session = runner, session
        self._reads_history = runner.speculative_config.reads_history
        # A proposer on the host drafts on rank 0; the scheduler sends its drafts to all ranks, and handles grammars
        # itself.
        drafts_here = runner.speculative_config.runs_target or get_tp_group().rank_in_group == 0
        self._drafts = drafts_here and not runner.speculative_config.plan.scheduler_alone
        self._built_in = None
        if runner.speculative_config.built_in is not None:
            self._built_in = built_in.BuiltInDrafter(runner, session.barrier)
        self._readings: Readings | None = None
        self._requests: dict[str, _Request] = {}
        # Draws seeds for requests without one, in the order of their arrival: the same on every rank.
        self._random = np.random.default_rng(runner.model_config.seed)
        self._drafted_at: float | None = 0.0  # time at which the last drafting ended; None: the last step was off

    def _may_draft(self, row: int) -> bool:
        return self.verifier is None or self.verifier.may_draft(row)

    def _adds_none_to(self, row: int) -> bool:
        """Returns whether a request has a grammar, but its verification supports only one position."""
        params = self._runner.requests[self._runner.input_batch.req_ids[row]].sampling_params
        return params is not None and params.structured_outputs is not None and not self._may_draft(row)

    def load_model(self, target: Any) -> None:
        self.first_layers = FirstLayers(target, self._runner.speculative_config.plugin_config)

        def loaded() -> None:
            self._readings = Readings.of(self._runner, self._session.barrier.proposer, target)

        self._session.when_loaded = loaded

    def compile_exits(self, *args: Any, **kwargs: Any) -> None:
        assert self.first_layers is not None
        self.first_layers.compile(self._runner.speculative_config.plugin_config)

    def update_states(self, update: Any, scheduler_output: Any) -> Any:
        """Forgets ended and preempted requests before vLLM drops them. A session's next turn is a new request."""
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        gone |= {new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in self._requests}
        if gone:
            barrier = self._session.barrier
            barrier.forget(sorted(gone), self._texts_of(gone) if barrier.guard.reads_ends else {})
            if self._readings is not None:
                self._readings.forget(gone)
            for request_id in gone:
                self._requests.pop(request_id, None)
        result = update(scheduler_output)
        if self.verifier is not None:
            # The plugin's noise needs no torch generator. vLLM resets the generator of a seeded request within its
            # prompt; on a CPU this raises, and the server ends.
            self._runner.input_batch.generators.clear()
        return result

    def _texts_of(self, request_ids: Iterable[str]) -> dict[str, Any]:
        batch = self._runner.input_batch
        rows = {name: batch.req_id_to_index[name] for name in request_ids if name in batch.req_id_to_index}
        return {name: batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]] for name, row in rows.items()}

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            cached = self._runner.requests[request_id]
            params = cached.sampling_params
            seed = getattr(params, "seed", None)
            if seed is None:
                seed = int(self._random.integers(1 << 63))
            # vLLM seeds torch.Generator, which accepts signed and unsigned 64-bit seeds.
            seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
            limits = RequestLimits.of(params, cached.num_prompt_tokens, self._runner.max_model_len)
            request = self._requests[request_id] = _Request(limits.frozen(), seed)
        return request

    def seed(self, request_id: str) -> int:
        """Returns the seed of a request's noise, for drafting and for verification."""
        return self._request(request_id).seed

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], *step: Any
    ) -> list[list[int]]:
        """Returns one list of draft token ids per request, in the runner's order. A request in the middle of its prompt
        gets no draft. Methods that read tokens also skip requests with prompt embeddings, since V1 leaves old token ids
        in their rows."""
        input_batch, is_off = self._runner.input_batch, news_of(scheduler_output).is_off
        if is_off and not scheduler_output.scheduled_spec_decode_tokens:
            self._drafted_at = None
            return [[] for _ in sampled_token_ids]
        unread = input_batch.req_prompt_embeds if self._reads_history else ()
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens and row not in unread]
        request_ids = [input_batch.req_ids[row] for row in rows]
        num_accepted = np.array([len(sampled_token_ids[row]) - 1 for row in rows], np.int32)
        if is_off:  # and the last drafts have an outcome
            self._session.count(self._feedback(request_ids, num_accepted, scheduler_output))
            self._drafted_at = None
            return [[] for _ in sampled_token_ids]
        num_tokens = input_batch.num_tokens_no_spec[rows]
        requests = [self._request(request_id) for request_id in request_ids]
        batch = DraftBatch(
            request_ids=request_ids,
            token_ids=Views.of_rows(view(input_batch.token_ids_cpu), rows, num_tokens.tolist()),
            max_num_draft=self._max_num_draft(rows, requests, num_tokens.tolist()),
            options=[request.limits.options for request in requests],
            prompt_lengths=[request.limits.num_prompt_tokens for request in requests],
        )
        offer = None
        if self._built_in is not None:
            offer = self._built_in.draft(batch, num_accepted, rows, scheduler_output, sampled_token_ids, *step)
        feedback = self._feedback(request_ids, num_accepted, scheduler_output)
        adds = self._session.scheduler_stage is not None
        drafts = [NEVER if adds and self._adds_none_to(row) else [] for row in range(len(sampled_token_ids))]
        if not self._drafts:
            self._session.count(feedback, len(rows))
            return drafts
        if self._readings is not None and rows:
            self._readings.on_step(batch, rows, num_tokens, num_accepted, step[1], step[-2])
        batch = replace(batch, target=self._target(rows, num_tokens, requests, *step), offer=offer)
        draft = self._session.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        if self.verifier is not None:
            self.verifier.save_q(batch.request_ids, draft.logits)
        for row, tokens, count in zip(rows, draft.token_ids.tolist(), draft.num_draft.tolist(), strict=True):
            drafts[row] = tokens[:count] or drafts[row]
        return drafts

    def _max_num_draft(self, rows: list[int], requests: list[_Request], num_tokens: list[int]) -> Any:
        longest = self._runner.num_spec_tokens
        limits = [
            request.limits.max_draft_tokens(num, longest) if self._may_draft(row) else 0
            for row, request, num in zip(rows, requests, num_tokens, strict=True)
        ]
        return np.array(limits, np.int32)

    def _target(
        self, rows: list[int], num_tokens: Any, requests: list[_Request], sampling: Any, hidden_states: Any, *step: Any
    ) -> Target | None:
        if self.first_layers is None or not rows:
            return None
        seeds = [request.seed for request in requests]
        target = target_of(self._runner, self.first_layers, rows, num_tokens, seeds, hidden_states, step[-2])
        if self.verifier is None:
            return target
        verified = self.verifier.sampling(sampling).at(rows)
        edit = edit_of_drafts(sampling, self._runner, rows)
        return replace(target, sampling=replace(target.sampling, verified=verified), edit=edit)

    def _feedback(self, request_ids: list[str], num_accepted: Any, scheduler_output: Any) -> Feedback:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_draft = np.array([len(scheduled.get(request_id, ())) for request_id in request_ids], np.int32)
        total, num_decoded = scheduler_output.total_num_scheduled_tokens, len(request_ids) + int(num_draft.sum())
        if self._drafted_at is None:
            return Feedback(request_ids, num_draft, num_accepted)
        ms = (time.perf_counter() - self._drafted_at) * 1000
        if total == num_decoded:
            return Feedback(request_ids, num_draft, num_accepted, ms)
        return Feedback(request_ids, num_draft, num_accepted, mixed_ms=ms * num_decoded / total)
