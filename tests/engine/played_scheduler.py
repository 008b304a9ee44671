"""Schedulers of ours as an engine makes them, with a worker that draws numbers: thousands of steps in a second."""

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_plugin import engine_config
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_specplugins.request_options import draft_limit

VOCAB_SIZE, BLOCK_SIZE = 30, 16


class Played:
    """A scheduler and its worker, as many steps apart as the engine's.

    Args:
        num_blocks: of the KV cache; None: what one request of `max_model_len` tokens takes.
        accept_prob: of each token of a draft.
    """

    def __init__(
        self, config: dict[str, Any], num_blocks: int | None = None, accept_prob: float = 0.8, **arguments: Any
    ):
        arguments = {"enable_prefix_caching": True, "block_size": BLOCK_SIZE, **arguments}
        self.config = engine_config(config, **arguments)
        self.max_model_len = self.config.model_config.max_model_len
        num_blocks = num_blocks or -(-self.max_model_len // BLOCK_SIZE) + 1  # one of them is vLLM's null block
        self.config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=SimpleNamespace(
                validate_tokens=lambda request, tokens: tokens, accept_tokens=lambda *_: True,
                should_advance=lambda *_: False,
            ),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )  # fmt: skip
        self.is_ahead, self.depth = self.config.scheduler_config.async_scheduling, self.config.max_concurrent_batches
        self._accept_prob, self._rng = accept_prob, np.random.default_rng(0)
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._lengths, self._drafts = dict[str, int](), dict[str, int]()  # as the worker knows them
        self.emitted, self.accepted, self.longest, self.preempted = dict[str, list[int]](), 0, 0, 0
        self._requests, self._aborted = dict[str, Request](), set[str]()
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(BLOCK_SIZE, sha256)

    def add(self, name: str, prompt: Iterable[int], max_tokens: int, stops: list[int] | None = None) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=stops)
        self.emitted[name] = []
        request = Request(name, list(prompt), params, None, block_hasher=self._hash)
        self._requests[name], self._lengths[name] = request, request.num_prompt_tokens
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self._aborted.add(name)
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedules a step; takes in the output of the oldest one that is under way, if there are enough."""
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self.preempted += len(scheduled.preempted_req_ids or ())
            self._under_way.append((scheduled, self._run(scheduled)))
            if len(self._under_way) < self.depth and self.scheduler.has_requests():
                return
        if not self._under_way:
            return
        scheduled, output = self._under_way.popleft()
        outputs = self.scheduler.update_from_output(scheduled, output)
        for given in (one for own in outputs.values() for one in own.outputs):
            self.emitted[given.request_id] += given.new_token_ids
        if not self.is_ahead:
            drafts = {name: self._drafts[name] for name in scheduled.num_scheduled_tokens if name in self._drafts}
            tokens = [self._rng.integers(VOCAB_SIZE, size=num).tolist() for num in drafts.values()]
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), tokens))

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """The worker, which knows what was sampled before, and drafts to a request's end alone."""
        names, sampled = list(scheduled.num_scheduled_tokens), list[list[int]]()
        for name in names:
            request = self.scheduler.requests[name]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            there = min(len(scheduled.scheduled_spec_decode_tokens.get(name, ())), self._drafts.get(name, 0))
            num = 1 + int((self._rng.random(there) < self._accept_prob).cumprod().sum())
            sampled.append(self._rng.integers(VOCAB_SIZE, size=num).tolist())
            self._lengths[name] += num
            end = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
            self._drafts[name] = draft_limit({}, self._lengths[name], self.scheduler.num_spec_tokens, end)
            self.accepted, self.longest = self.accepted + num - 1, max(self.longest, num - 1)
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)

    def run(self, most: int = 2000) -> None:
        """Until all requests are over; AssertionError: they are not after so many steps."""
        for _ in range(most):
            if not self.scheduler.has_requests() and not self._under_way:
                return
            self.step()
        raise AssertionError(f"after {most} steps: {self.scheduler.requests}")

    def check(self) -> None:
        """Each request ended at its end, and tokens a step, as the worker is told them, are those that came out."""
        for name, request in self._requests.items():
            tokens, params = self.emitted[name], request.sampling_params
            most = min(params.max_tokens, self.max_model_len - request.num_prompt_tokens)
            stopped = bool(tokens) and tokens[-1] in params.stop_token_ids
            assert name in self._aborted or stopped or len(tokens) == most, name
            assert len(tokens) <= most and set(tokens[:-1]).isdisjoint(params.stop_token_ids), name
        num_steps, dropped = self.scheduler._sent
        num_begun = sum(map(bool, self.emitted.values()))
        assert num_steps + self.accepted - sum(dropped) == sum(map(len, self.emitted.values())) - num_begun
