"""A proposer built into vLLM, as a stage of a cascade on Model Runner V2: vLLM's own factory makes it, and it is run
at every step, over all tokens of that step, so that its KV cache holds every token that the target's does.
"""

import time
from collections.abc import Callable, Sequence
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

from vllm_specplugins.draft import Offer
from vllm_specplugins.engine.frontend.spec_config import for_built_in
from vllm_specplugins.engine.hooks import both, replaced
from vllm_specplugins.structures.arrays import DraftArrays, of_stage


class HostOffer:
    """What vLLM's own speculator drafts in a step, and how likely it thinks each token is, on its way to the host."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._start = self._mark()

    def take(self, drafts: torch.Tensor, accept_probs: torch.Tensor, num_tokens: int) -> "HostOffer":
        """Its drafts, after so many tokens it left none; the time since then is theirs."""
        self._drafts, self._accept_probs = drafts[:, :num_tokens], accept_probs[: len(drafts), :num_tokens]
        self._end = self._mark()
        return self

    def of(self, rows: Sequence[int]) -> Offer:
        """The drafts for these rows of the batch; waits for them."""
        token_ids = self._drafts.to("cpu", torch.int32).numpy()[rows]
        accept_probs = self._accept_probs.cpu().numpy()[rows]
        ms = self._start.elapsed_time(self._end) if self._is_cuda else (self._end - self._start) * 1000
        return Offer(token_ids, ms, None if np.isnan(accept_probs).any() else accept_probs)

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class DeviceOffer:
    """The same where a graph finds it: in vLLM's own buffers, of all steps.

    Args:
        max_num_draft: K of the cascade.
    """

    def __init__(self, theirs: Any, max_num_draft: int):
        self._token_ids, self._accept_probs = theirs.draft_tokens, theirs.draft_token_confidence_probs
        self.max_num_draft, self._rest = theirs.num_speculative_steps, (0, max_num_draft - theirs.num_speculative_steps)
        self._num, self._num_there = 0, torch.zeros((), dtype=torch.int32, device=theirs.device)

    def take(self, drafts: torch.Tensor, accept_probs: torch.Tensor, num_tokens: int) -> "DeviceOffer":
        """See HostOffer; they stay where they are."""
        return self.begin(num_tokens)

    def begin(self, num_tokens: int) -> "DeviceOffer":
        """A step for which it drafts so many."""
        if num_tokens != self._num:
            self._num = num_tokens
            self._num_there.fill_(num_tokens)
        return self

    def drafts(self, stage: int, max_draft: torch.Tensor) -> DraftArrays:
        """Its drafts for the first rows, at most so many tokens for each, [R]; the stage has this index."""
        num_rows = len(max_draft)
        token_ids = pad(self._token_ids[:num_rows].int().clamp_(min=0), self._rest)
        drafts = of_stage(stage, token_ids, torch.minimum(max_draft, self._num_there), max_draft * 0.0 + 1)
        confidence = pad(self._accept_probs[:num_rows], self._rest).clamp(0, 1 - 1e-6)
        return drafts._replace(confidence=torch.where(confidence.isnan(), drafts.confidence, confidence))


class TrimmedGraphs(SpeculatorCudaGraphManager):
    """vLLM's graphs of a drafter's first step, of any lengths up to `longest`, as the target's are where drafts are
    trimmed on the device; None: of a batch with a prompt."""

    longest: int | None = None

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's signature; it does not say the longest."""
        return super().dispatch(*args, **{**kwargs, "max_query_len": self.longest})


def rating(build: Callable[..., Any], vllm_config: VllmConfig, *arguments: Any) -> Any:
    """vLLM's own speculator, made by its factory so that it says how likely each of its tokens is to be accepted: by a
    head of its own (dspark), or by vLLM's estimator, which goes by the draft's logits; not draft_model, which has no
    graphs: a launch for each token more.

    It does that for adaptive verification alone, which nobody else shall see: our gate trims the drafts. The estimator
    learns nothing, for what is verified is often another stage's; the gate's records do that.
    """
    alone = for_built_in(vllm_config)
    speculative_config = alone.speculative_config
    says_nothing = speculative_config.use_local_argmax_reduction or speculative_config.method == "draft_model"
    speculative_config.enable_adaptive_verification = speculative_config.method == "dspark" or not says_nothing
    theirs = build(alone, *arguments)
    speculative_config.enable_adaptive_verification = False
    theirs.draft_token_confidence_probs.fill_(torch.nan)  # some rate nothing
    theirs.observe_verification = lambda idx_mapping, num_sampled, num_rejected: None
    return theirs


def context_alone(theirs: Any) -> dict[str, Any]:
    """What lets a drafter of whole blocks (dflash, dspark) take in what was verified, and draft nothing."""
    if not isinstance(theirs, DFlashSpeculator):
        return {}
    without = theirs.vllm_config, theirs.device, CUDAGraphMode.NONE, theirs.num_query_per_req
    nothing = {name: lambda *_, **__: None for name in ("_generate_draft", "_build_uniform_attn_metadata")}
    return {"query_cudagraph_manager": DFlashCudaGraphManager(*without), **nothing}


def run_before(theirs: Any, ours: Any, max_num_draft: int) -> Any:
    """vLLM's own speculator, changed so that ours gets its drafts and has the last word.

    The runner deals with vLLM's own, whose layers and KV cache it has to prepare. It was built with the K of its stage,
    but takes in steps that verified up to `max_num_draft` tokens of each request.
    """
    propose, own_most, resting = theirs.propose, theirs.num_speculative_steps, context_alone(theirs)

    def drafted(input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any) -> Any:
        offer = ours.new_offer()
        most = own_most if num_speculative_tokens is None else min(own_most, num_speculative_tokens)
        own: dict[str, Any] = {}
        if ours.spares(input_batch):  # it takes in what was verified, which brings a token or none
            most, own = min(most, 0 if resting else 1), resting
        if isinstance(theirs, StandaloneARSpeculator):  # what it is told of K it does not look at
            own = {"num_speculative_steps": max(1, most)}
        if isinstance(graphs := getattr(theirs, "prefill_cudagraph_manager", None), TrimmedGraphs):
            graphs.longest = None if input_batch.has_prefill else int(input_batch.num_scheduled_tokens.max())
        with replaced(theirs, own):
            drafts = propose(input_batch, *args, num_speculative_tokens=most, **kwargs)
        return offer.take(drafts, theirs.draft_token_confidence_probs, most)

    def init_cudagraph_manager(cudagraph_mode: Any) -> None:
        """Its first step takes in what was verified, and its graphs of that are as wide."""
        with replaced(theirs, {"num_speculative_steps": max_num_draft}):
            original_init(cudagraph_mode)
        # The target's metadata is that of its layers: its graphs are of any lengths where all attend alike.
        backends = {group.backend for groups in theirs.target_attn_groups for group in groups}
        if ours.enable_adaptive_verification and len(backends) == 1:
            own = theirs.vllm_config, theirs.device, cudagraph_mode, max_num_draft + 1
            theirs.prefill_cudagraph_manager = TrimmedGraphs(*own, varlen_decode=True)

    if isinstance(theirs, TargetDependentARSpeculator):
        original_init = theirs.init_cudagraph_manager
        theirs.init_cudagraph_manager = init_cudagraph_manager

    def propose_both(input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        theirs_now = partial(drafted, input_batch, *args, dummy_run=dummy_run, **kwargs)
        if dummy_run:  # while the engine starts, or another rank works: its faults are the engine's
            ours.offer = theirs_now()
        else:
            takes_in_prompts = input_batch.num_tokens > input_batch.num_reqs * (1 + theirs.num_speculative_steps)
            ours.offer = ours.barrier.call_built_in(theirs_now, is_timed=not takes_in_prompts)
        result: torch.Tensor = ours.propose(input_batch, *args, dummy_run=dummy_run, **kwargs)
        return result

    theirs.propose = propose_both
    for name in ("load_model", "set_attn", "init_cudagraph_manager", "capture"):
        setattr(theirs, name, both(getattr(ours, name), getattr(theirs, name)))
    theirs.specplugins = ours
    return theirs
