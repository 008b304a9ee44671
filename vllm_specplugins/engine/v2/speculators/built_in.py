"""A proposer built into vLLM, as a stage of a cascade on Model Runner V2: vLLM's own factory makes it, and it is run
at every step, over all tokens of that step, so that its KV cache holds every token that the target's does.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from vllm_specplugins.draft import Offer
from vllm_specplugins.engine.frontend.spec_config import for_built_in
from vllm_specplugins.engine.hooks import both


class DeviceOffer:
    """What vLLM's own speculator drafts in a step, and how likely it thinks each token is, still on the device."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._start = self._mark()

    def take(self, drafts: torch.Tensor, accept_probs: torch.Tensor) -> "DeviceOffer":
        """Its drafts; the time since then is theirs."""
        self._drafts, self._accept_probs, self._end = drafts, accept_probs, self._mark()
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


def rating(build: Callable[..., Any], vllm_config: VllmConfig, *arguments: Any) -> Any:
    """vLLM's own speculator, made by its factory so that it says how likely each of its tokens is to be accepted: by a
    head of its own (dspark), or by vLLM's estimator, which goes by the draft's logits.

    It does that for adaptive verification alone, which nobody else shall see: our gate trims the drafts. The estimator
    learns nothing, for what is verified is often another stage's; the gate's records do that.
    """
    alone = for_built_in(vllm_config)
    speculative_config = alone.speculative_config
    speculative_config.enable_adaptive_verification = (
        speculative_config.method == "dspark" or not speculative_config.use_local_argmax_reduction
    )
    theirs = build(alone, *arguments)
    speculative_config.enable_adaptive_verification = False
    theirs.draft_token_confidence_probs.fill_(torch.nan)  # some rate nothing
    theirs.observe_verification = lambda idx_mapping, num_sampled, num_rejected: None
    return theirs


def run_before(theirs: Any, ours: Any, max_num_draft: int) -> Any:
    """vLLM's own speculator, changed so that ours gets its drafts and has the last word.

    The runner deals with vLLM's own, whose layers and KV cache it has to prepare. It was built with the K of its stage,
    but takes in steps that verified up to `max_num_draft` tokens of each request.
    """
    propose, own_most = theirs.propose, theirs.num_speculative_steps

    def drafted(*args: Any, num_speculative_tokens: int | None = None, **kwargs: Any) -> DeviceOffer:
        offer = DeviceOffer(ours.device)
        most = own_most if num_speculative_tokens is None else min(own_most, num_speculative_tokens)
        drafts = propose(*args, num_speculative_tokens=most, **kwargs)
        accept_probs = theirs.draft_token_confidence_probs[: len(drafts)]
        return offer.take(drafts[:, :most], accept_probs[:, :most])  # after so many it leaves no tokens

    def init_cudagraph_manager(cudagraph_mode: Any) -> None:
        """Its first step takes in what was verified, and its graphs of that are as wide."""
        theirs.num_speculative_steps = max_num_draft
        original_init(cudagraph_mode)
        theirs.num_speculative_steps = own_most

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
    for name in ("load_model", "set_attn"):  # ours has them if it runs the target
        if hasattr(ours, name):
            setattr(theirs, name, both(getattr(ours, name), getattr(theirs, name)))
    theirs.specplugins = ours
    return theirs
