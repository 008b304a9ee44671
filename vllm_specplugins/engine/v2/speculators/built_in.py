"""Model Runner V2: runs a drafter of vLLM as a stage of a cascade. vLLM's factory creates the drafter, which reads all
tokens of every step, so its KV cache is complete."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from vllm_specplugins.cascade.built_in import guard_of
from vllm_specplugins.cascade.on_device import MODEL, DeviceBatch, DeviceSource
from vllm_specplugins.draft import Draft, DraftBatch, Offer
from vllm_specplugins.engine.built_in import for_built_in, refuse_second_owner, without_built_in
from vllm_specplugins.engine.hooks import both, replaced
from vllm_specplugins.engine.v2.speculators.device import DeviceSpeculator
from vllm_specplugins.engine.v2.speculators.host import HostSpeculator
from vllm_specplugins.kernels.acceptance import Other
from vllm_specplugins.structures.arrays import Floats
from vllm_specplugins.structures.drafts import DraftArrays, better, of_stage


class BuiltInDrafts:
    """A source on the device: the drafts in the persistent buffers of vLLM's speculator.

    Args:
        max_num_draft: K of the cascade.
        tracker: rates drafts by their `worth`.
        lookups: continue its drafts.
    """

    def __init__(self, theirs: Any, max_num_draft: int, tracker: Any, lookups: Any):
        self._lookups = lookups
        self._token_ids, self._accept_probs = theirs.draft_tokens, theirs.draft_token_confidence_probs
        self.max_num_draft, self._tracker = theirs.num_speculative_steps, tracker
        self._padding = 0, max_num_draft - self.max_num_draft
        self._num, self._num_there = 0, torch.zeros((), dtype=torch.int32, device=theirs.device)

    def begin(self, num_tokens: int) -> None:
        """Begins a step in which it drafts num_tokens tokens for each request."""
        if num_tokens != self._num:
            self._num = num_tokens
            self._num_there.fill_(num_tokens)

    def start(self) -> None:
        """Records that drafting starts."""

    def take(self, drafts: torch.Tensor, num_tokens: int) -> "BuiltInDrafts":
        """Accepts its drafts, in which the first num_tokens tokens are new."""
        self.begin(num_tokens)
        return self

    def draft(self, batch: DeviceBatch, prefix: DraftArrays | None, limits: torch.Tensor) -> DraftArrays:
        """Chooses, for each row, the draft with the larger gain: the previous source's draft, or this draft followed by
        the lookup's tokens."""
        assert prefix is not None
        drafts, gains = self.drafts(limits), None
        joined = self._lookups.continued(batch, drafts)
        if batch.rates:
            gain = self._tracker.worth(prefix, Other(MODEL, 0, False, limits), reports=True).gain
            gains = gain, self._tracker.worth(joined).gain
        num_looked_up = torch.maximum(prefix.num_draft, joined.num_draft - drafts.num_draft)
        by_stage = num_looked_up, torch.where(limits > 0, drafts.num_draft, -1)
        return better(prefix, joined, gains)._replace(by_stage=by_stage)

    def drafts(self, limits: torch.Tensor) -> DraftArrays:
        num_rows = len(limits)
        token_ids = pad(self._token_ids[:num_rows].int().clamp_(min=0), self._padding)
        drafts = of_stage(MODEL, token_ids, torch.minimum(limits, self._num_there), limits * 0.0 + 1)
        confidence = pad(self._accept_probs[:num_rows], self._padding).clamp(0, 1 - 1e-6)
        return drafts._replace(confidence=torch.where(confidence.isnan(), drafts.confidence, confidence))


class DraftsForHost:
    """Copies the drafts of vLLM's speculator to the host, and times the drafting."""

    def __init__(self, theirs: Any):
        self._theirs, self._is_cuda = theirs, theirs.device.type == "cuda"

    def start(self) -> None:
        self._start = self._mark()

    def take(self, drafts: torch.Tensor, num_tokens: int) -> "DraftsForHost":
        self._drafts = drafts[:, :num_tokens]
        self._accept_probs = self._theirs.draft_token_confidence_probs[: len(drafts), :num_tokens]
        self._end = self._mark()
        return self

    def of(self, rows: Sequence[int]) -> Offer:
        """Waits for the drafts of these rows of the batch."""
        token_ids = self._drafts.to("cpu", torch.int32).numpy()[rows]
        accept_probs = self._accept_probs.cpu().numpy()[rows]
        ms = self._start.elapsed_time(self._end) if self._is_cuda else (self._end - self._start) * 1000
        return Offer(Draft.whole(token_ids, None if np.isnan(accept_probs).any() else accept_probs), ms)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class TrimmedGraphs(SpeculatorCudaGraphManager):
    """Returns vLLM's graphs of a drafter's first step, for any lengths up to `longest`, as for the target if the device
    trims drafts; None if the batch has a prompt."""

    longest: int | None = None

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(*args, **{**kwargs, "max_query_len": self.longest})


def rating(build: Callable[..., Any], vllm_config: VllmConfig, *arguments: Any) -> Any:
    """Creates vLLM's speculator so that it reports each token's acceptance probability, from a head (dspark) or from
    vLLM's estimator, which reads the draft's logits. draft_model reports none: it has no graphs, and the estimator
    would need a launch per token. vLLM reports probabilities only under adaptive verification, so only the factory sees
    that setting, and the gate trims the drafts. The estimator ignores outcomes, since the verified tokens often come
    from another stage; the gate records the outcomes.
    """
    alone = for_built_in(vllm_config)
    speculative_config = alone.speculative_config
    is_silent = speculative_config.use_local_argmax_reduction or speculative_config.method == "draft_model"
    speculative_config.enable_adaptive_verification = speculative_config.method == "dspark" or not is_silent
    theirs = build(alone, *arguments)
    refuse_second_owner(theirs)
    speculative_config.enable_adaptive_verification = False
    theirs.draft_token_confidence_probs.fill_(torch.nan)  # some report none
    theirs.observe_verification = lambda idx_mapping, num_sampled, num_rejected: None
    return theirs


def context_alone(theirs: Any) -> dict[str, Any]:
    """Returns attributes that make a drafter of whole blocks (dflash, dspark) read verified tokens without drafting."""
    if not isinstance(theirs, DFlashSpeculator):
        return {}
    without = theirs.vllm_config, theirs.device, CUDAGraphMode.NONE, theirs.num_query_per_req
    nothing = {name: lambda *_, **__: None for name in ("_generate_draft", "_build_uniform_attn_metadata")}
    return {"query_cudagraph_manager": DFlashCudaGraphManager(*without), **nothing}


def recorded_for_each_length(theirs: Any) -> Callable[[int], Sequence[int]]:
    """Makes vLLM record a drafter's later steps for each number of steps, since a graph of all steps would always run
    all of them. Returns a function from a length to the lengths up to it that differ in time. The shortest length reads
    the verified tokens, which yields one token, or none from a drafter of whole blocks."""
    lengths = [(size, size, number) for size, number in enumerate(range(2, theirs.num_speculative_steps + 1), 1)]
    each = not isinstance(theirs, DFlashSpeculator | TargetDependentARSpeculator)
    if isinstance(theirs, TargetDependentARSpeculator) and 1 < len(lengths) <= theirs.max_num_reqs:
        capture, each = theirs.capture, True

        def captured() -> None:
            with replaced(theirs.speculative_config, {"num_speculative_tokens_per_batch_size": lengths}):
                capture()

        theirs.capture = captured

    def up_to(longest: int) -> Sequence[int]:
        least = 0 if isinstance(theirs, DFlashSpeculator) else min(1, longest)
        return range(least, longest + 1) if each else (least, longest)

    return up_to


class _AfterDrafter:
    """A speculator that proposes after a drafter of vLLM.

    Attributes: offer: the drafter's drafts of this step; None: it failed. propose_theirs: the drafter's `propose`, set
        by with_drafter.
    """

    offer: Any = None
    propose_theirs: Callable[..., Any]


class AfterDrafterOnHost(_AfterDrafter, HostSpeculator):
    def __init__(self, theirs: Any, vllm_config: VllmConfig, *arguments: Any):
        super().__init__(without_built_in(vllm_config), *arguments)
        self.offers = DraftsForHost(theirs)

    def drafter_length(self, input_batch: Any, lengths: Sequence[int]) -> int:
        """Returns the number of tokens that the drafter drafts: all, since the gate trims them."""
        return lengths[-1]

    def _batch_for(self, input_batch: Any, asked: Sequence[int]) -> DraftBatch:
        batch = super()._batch_for(input_batch, asked)
        return batch if self.offer is None else replace(batch, offer=self.offer.of(asked))


class AfterDrafterOnDevice(_AfterDrafter, DeviceSpeculator):
    """The drafter is the second stage on the device."""

    def __init__(self, theirs: Any, vllm_config: VllmConfig, *arguments: Any):
        super().__init__(without_built_in(vllm_config), *arguments)
        self.offers = BuiltInDrafts(theirs, vllm_config.num_speculative_tokens, self.outcomes, self.lookups)

    def _model_source(self, proposer: Any) -> DeviceSource:
        return self.offers

    def _paying_length(self, reports: Floats, lengths: Sequence[int]) -> int:
        """Chooses by times if drafts are trimmed."""
        budget = self.session.budget
        if budget is None:
            return super()._paying_length(reports, lengths)
        return budget.drafter_length(reports, lengths, self.limits.of_stages[MODEL])

    def rests(self, input_batch: Any, length: int) -> bool:
        """Rests only while drafting is off, since the drafter must read all tokens."""
        return self.num_off > 1 and super().rests(input_batch, length)

    @property
    def _rates(self) -> bool:
        return bool(self.lookups) and (self.enable_adaptive_verification or self._policy == "auto")


def with_drafter(build: Callable[..., Any], vllm_config: VllmConfig, *arguments: Any) -> Any:
    """Returns vLLM's speculator, changed so that it drafts first and our speculator proposes afterwards. The runner
    holds vLLM's speculator, since it prepares that speculator's layers and KV cache. The speculator is built with the
    stage's K, but reads steps that verified up to `max_num_draft` tokens per request."""
    theirs, max_num_draft = rating(build, vllm_config, *arguments), vllm_config.num_speculative_tokens
    is_on_device = vllm_config.speculative_config.plan.on_device
    kind = AfterDrafterOnDevice if is_on_device else AfterDrafterOnHost
    ours: Any = kind(theirs, vllm_config, *arguments)
    ours.propose_theirs, length, resting = theirs.propose, theirs.num_speculative_steps, context_alone(theirs)
    lengths_up_to = recorded_for_each_length(theirs)

    def drafted(
        input_batch: Any, *args: Any, dummy_run: bool, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        ours.offers.start()
        num_tokens = length if num_speculative_tokens is None else min(length, num_speculative_tokens)
        if not dummy_run:
            num_tokens = ours.drafter_length(input_batch, lengths_up_to(num_tokens))
        attributes: dict[str, Any] = {} if num_tokens else resting
        if isinstance(theirs, StandaloneARSpeculator):  # it ignores its argument
            attributes = {"num_speculative_steps": max(1, num_tokens)}
        if isinstance(graphs := getattr(theirs, "prefill_cudagraph_manager", None), TrimmedGraphs):
            graphs.longest = None if input_batch.has_prefill else int(input_batch.num_scheduled_tokens.max())
        with replaced(theirs, attributes):
            options = {"dummy_run": dummy_run, "num_speculative_tokens": num_tokens, **kwargs}
            drafts = ours.propose_theirs(input_batch, *args, **options)
        return ours.offers.take(drafts, num_tokens)

    def init_cudagraph_manager(cudagraph_mode: Any) -> None:
        """Records its first step, which reads verified tokens and is as wide as a step of the target."""
        with replaced(theirs, {"num_speculative_steps": max_num_draft}):
            original_init(cudagraph_mode)
        # Its layers use the target's metadata, whose graphs allow any lengths if all layers have the same attention.
        backends = {group.backend for groups in theirs.target_attn_groups for group in groups}
        if ours.enable_adaptive_verification and len(backends) == 1:
            arguments = theirs.vllm_config, theirs.device, cudagraph_mode, max_num_draft + 1
            theirs.prefill_cudagraph_manager = TrimmedGraphs(*arguments, varlen_decode=True)

    if isinstance(theirs, TargetDependentARSpeculator):
        original_init = theirs.init_cudagraph_manager
        theirs.init_cudagraph_manager = init_cudagraph_manager

    def propose_both(input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        theirs_now = partial(drafted, input_batch, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run:  # the engine starts, or another rank runs: a fault belongs to the engine
            ours.offer = theirs_now()
        else:
            takes_in_prompts = input_batch.num_tokens > input_batch.num_reqs * (1 + theirs.num_speculative_steps)
            guard = guard_of(ours.session.barrier.proposer)
            ours.offer = guard.call_in_engine(theirs_now, is_timed=not takes_in_prompts)
        if ours.offer is None and is_on_device:
            ours.offers.begin(0)
        return ours.propose(input_batch, *args, dummy_run=dummy_run, **kwargs)

    theirs.propose = propose_both
    for name in ("load_model", "set_attn", "init_cudagraph_manager", "capture"):
        setattr(theirs, name, both(getattr(ours, name), getattr(theirs, name)))
    theirs.specplugins = ours
    return theirs
