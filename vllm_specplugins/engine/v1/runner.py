"""Adapter for Model Runner V1: the runner that CPU-only installs have.

V1 gives its own custom proposers token ids and nothing else, so the runner's `propose_draft_token_ids` is
replaced, on that one runner, by one that sees all that the step knows.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.sample import rejection_sampler
from vllm.v1.worker import gpu_model_runner

from vllm_specplugins.config import methods_of
from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.grammar.output import NEVER, forced_in
from vllm_specplugins.engine.hooks import both, replaced, wrap
from vllm_specplugins.engine.request_limits import RequestLimits
from vllm_specplugins.engine.target.end import served_end
from vllm_specplugins.engine.target.layers import FirstLayers
from vllm_specplugins.engine.v1 import built_in
from vllm_specplugins.engine.v1.rows import metadata_of
from vllm_specplugins.engine.v1.target import reading_of, target_of
from vllm_specplugins.engine.v1.verify import Verifier, all_logits_processors
from vllm_specplugins.engine.v1.vllm_sampler import expand_batch_to_tokens, probs_of
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.proposers.learning.learner import learner_of
from vllm_specplugins.structures.arrays import Views, view
from vllm_specplugins.target import Reading, Target

_MOST_UNREAD = 64  # steps whose states are kept for a part that learns from them


@contextmanager
def while_built(vllm_config: VllmConfig) -> Iterator[None]:
    """Lets a runner be built: to V1 we are a `custom_class` proposer, unless it shall build one of its own."""
    names = built_in.narrowed()
    if vllm_config.speculative_config.built_in is None:
        vllm_config.speculative_config.method = "custom_class"
        names = {"create_custom_proposer": lambda vllm_config: SimpleNamespace(load_model=lambda model: None)}
    with all_logits_processors(vllm_config), replaced(gpu_model_runner, names):
        yield


def attach(runner: Any, barrier: FaultBarrier) -> None:
    """Hands the runner's drafting steps and its news of requests to our proposer."""
    if not hasattr(runner, "drafter"):  # a pipeline rank that does not draft
        return
    adapter = _Adapter(runner, barrier)
    runner.drafter.adapter = adapter
    runner.propose_draft_token_ids = adapter.propose_draft_token_ids
    wrap(runner, "_update_states", adapter.update_states)
    if runner.speculative_config.runs_target:
        runner.drafter.load_model = both(runner.drafter.load_model, adapter.load_model)
        runner.profile_run = both(runner.profile_run, adapter.compile_exits)
    draft_to_the_end(runner)
    runner.update_max_model_len = both(runner.update_max_model_len, lambda max_model_len: draft_to_the_end(runner))
    if runner.speculative_config.plugin_config.common.verification == "fused":
        adapter.verifier = Verifier(runner, adapter.seed)
        runner._sample = adapter.verifier.sample
        wrap(runner, "_calc_spec_decode_metadata", partial(metadata_of, runner.device))
    elif runner.device.type == "cpu":
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def draft_to_the_end(runner: Any) -> None:
    """V1 drafts zeros for the whole batch when one request nears this length, which sinks where memory is short
    (`--max-model-len auto`); we shorten that request's draft instead."""
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens + 1


@dataclass(frozen=True, slots=True)
class _Request:
    limits: RequestLimits
    seed: int


class _Adapter:
    verifier: Verifier | None = None  # None: vLLM's
    first_layers: FirstLayers | None = None  # of the target, for a model proposer

    def __init__(self, runner: Any, barrier: FaultBarrier):
        self._runner = runner
        self._barrier = barrier
        methods = methods_of(runner.speculative_config.plugin_config)
        self._forces = "grammar" in methods
        # A proposer on the host is asked on rank 0 alone, whose drafts the scheduler hands out to all.
        is_asked = runner.speculative_config.runs_target or get_tp_group().rank_in_group == 0
        self._drafts = is_asked and methods != ["grammar"]  # which the scheduler asks
        self._built_in = None if runner.speculative_config.built_in is None else built_in.BuiltInDrafter(runner)
        self._learner = learner_of(barrier.proposer)
        self._read = deque[Reading]()  # that the learner has not looked at
        self._gone: list[str] = []  # requests, since then
        self._drafted_rows: dict[str, int] = {}  # of the last batch
        self._requests: dict[str, _Request] = {}
        # Requests without a seed get theirs in the order in which they come: the same on every rank.
        self._random = np.random.default_rng(runner.model_config.seed)
        self._drafted_at = 0.0  # when the last drafting ended

    def _may_draft(self, row: int) -> bool:
        return self.verifier is None or self.verifier.may_draft(row)

    def _is_forced_and_alone(self, row: int) -> bool:
        """Whether a request has a grammar, and can be verified at one position only."""
        params = self._runner.requests[self._runner.input_batch.req_ids[row]].sampling_params
        return params is not None and params.structured_outputs is not None and not self._may_draft(row)

    def load_model(self, target: Any) -> None:
        """V1 calls this on its drafter when the target is loaded."""
        self.first_layers = FirstLayers(target, self._runner.speculative_config.plugin_config)
        if self._learner is not None:
            self._learner.begin(served_end(target, self._runner.model_config), self._unread)

    def _unread(self) -> Iterator[Reading]:
        """In the learner's thread."""
        while self._read:
            yield self._read.popleft()

    def compile_exits(self, *args: Any, **kwargs: Any) -> None:
        """After vLLM's own compilation of the target, and with its signature."""
        assert self.first_layers is not None
        self.first_layers.compile(self._runner.speculative_config.plugin_config)

    def update_states(self, update: Any, scheduler_output: Any) -> Any:
        """Passes on which requests are gone before vLLM drops them. A session's next turn is a new request."""
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        gone |= {new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in self._requests}
        if gone:
            self._barrier.forget(sorted(gone))
            if self._learner is not None and self._learner.is_on:
                self._gone += sorted(gone)
            for request_id in gone:
                self._requests.pop(request_id, None)
        result = update(scheduler_output)
        if self.verifier is not None:
            # Our noise needs none of torch's generators. vLLM would wind back that of a seeded request in the middle of
            # its prompt, which a CPU's generator cannot do: the server dies of it.
            self._runner.input_batch.generators.clear()
            self.verifier.forced = forced_in(scheduler_output)
        if self._forces:
            self._barrier.forced = forced_in(scheduler_output)
        return result

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            cached = self._runner.requests[request_id]
            params = cached.sampling_params
            seed = getattr(params, "seed", None)
            if seed is None:
                seed = int(self._random.integers(1 << 63))
            # torch.Generator, which vLLM seeds so, takes 64 bits with and without a sign.
            seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
            limits = RequestLimits.of(params, cached.num_prompt_tokens, self._runner.max_model_len)
            request = self._requests[request_id] = _Request(limits.frozen(), seed)
        return request

    def seed(self, request_id: str) -> int:
        """The seed of a request's noise, for drafting and for verification."""
        return self._request(request_id).seed

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], *step: Any
    ) -> list[list[int]]:
        """vLLM's signature; returns one list of draft token ids a request, in the runner's order.

        A request in the middle of its prompt has sampled nothing and gets no draft; nor does one whose history is not
        all token ids, where tokens are read: V1 leaves there what stood in the row before.
        """
        input_batch, config = self._runner.input_batch, self._runner.speculative_config
        unread = input_batch.req_prompt_embeds if config.reads_history else ()
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens and row not in unread]
        request_ids = [input_batch.req_ids[row] for row in rows]
        num_accepted = np.array([len(sampled_token_ids[row]) - 1 for row in rows], np.int32)
        num_tokens = input_batch.num_tokens_no_spec[rows]
        requests = [self._request(request_id) for request_id in request_ids]
        batch = DraftBatch(
            request_ids=request_ids,
            token_ids=Views.of_rows(view(input_batch.token_ids_cpu), rows, num_tokens.tolist()),
            max_num_draft=self._max_num_draft(rows, requests, num_tokens.tolist()),
            options=[request.limits.options for request in requests],
        )
        offer = None
        if self._built_in is not None:
            most_decoded = len(input_batch.req_ids) * (1 + self._runner.num_spec_tokens)
            is_needed = partial(self._barrier.needs_built_in, batch, num_accepted)
            offer = self._barrier.call_built_in(
                partial(self._built_in.offer, is_needed, rows, scheduler_output, sampled_token_ids, *step),
                is_timed=scheduler_output.total_num_scheduled_tokens <= most_decoded,  # no prompt is taken in
            )
        feedback = self._feedback(request_ids, num_accepted, scheduler_output)
        drafts = [
            NEVER if self._forces and self._is_forced_and_alone(row) else [] for row in range(len(sampled_token_ids))
        ]
        if not self._drafts:
            self._barrier.count(feedback, len(rows))
            return drafts
        if self._learner is not None and rows:
            self._learner.step()
            if self._learner.is_on and len(self._read) < _MOST_UNREAD:
                options = [request.limits.options for request in requests]
                of_rows = self._runner, rows, num_tokens, num_accepted, options, step[1], step[-2]
                of_step = reading_of(*of_rows, self._learner.exits, self._drafted_rows)
                self._read.append(replace(of_step, gone=self._gone))
                self._gone = []
        batch = replace(
            batch,
            target=self._target(rows, num_tokens, requests, *step),
            offer=offer,
        )
        if self._learner is not None and self._learner.exits is not None:
            self._learner.exits.forget()
            self._drafted_rows = {request_id: row for row, request_id in enumerate(request_ids)}
        draft = self._barrier.propose(batch, feedback)
        self._drafted_at = time.perf_counter()
        self._keep(batch, draft)
        for row, tokens, count in zip(rows, draft.token_ids.tolist(), draft.num_draft.tolist(), strict=True):
            drafts[row] = tokens[:count] or drafts[row]
        return drafts

    def _max_num_draft(self, rows: list[int], requests: list[_Request], num_tokens: list[int]) -> Any:
        most = self._runner.num_spec_tokens
        limits = [
            request.limits.max_draft_tokens(num, most) if self._may_draft(row) else 0
            for row, request, num in zip(rows, requests, num_tokens, strict=True)
        ]
        return np.array(limits, np.int32)

    def _target(
        self, rows: list[int], num_tokens: Any, requests: list[_Request], sampling: Any, hidden_states: Any, *step: Any
    ) -> Target | None:
        """What a model proposer sees of these rows; None where the method reads histories alone."""
        if self.first_layers is None or not rows:
            return None
        seeds = [request.seed for request in requests]
        target = target_of(self._runner, self.first_layers, rows, num_tokens, seeds, hidden_states, step[-2])
        if self.verifier is None:
            return target
        verified = self.verifier.sampling(sampling).at(rows)
        edit = self.verifier.edit_of_drafts(sampling, rows)
        return replace(target, sampling=replace(target.sampling, verified=verified), edit=edit)

    def _feedback(self, request_ids: list[str], num_accepted: Any, scheduler_output: Any) -> Feedback:
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_draft = np.array([len(scheduled.get(request_id, ())) for request_id in request_ids], np.int32)
        only_decoded = scheduler_output.total_num_scheduled_tokens == len(request_ids) + num_draft.sum()
        step_ms = (time.perf_counter() - self._drafted_at) * 1000 if only_decoded else None
        return Feedback(request_ids, num_draft, num_accepted, step_ms)

    def _keep(self, batch: DraftBatch, draft: Draft) -> None:
        """Keeps what the drafts were drawn from for their verification, ours or vLLM's."""
        if self.verifier is not None:
            self.verifier.keep_draft(batch.request_ids, draft.logits)
        elif draft.logits is not None and batch.target is not None:
            self._runner._draft_probs = probs_of(draft.logits, batch.target.sampling.temperature)
            self._runner._draft_prob_req_ids = batch.request_ids
