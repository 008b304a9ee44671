"""A proposer built into vLLM, as a stage of a cascade on Model Runner V2: vLLM's own factory makes it, and it is run
at every step, over all tokens of that step, so that its KV cache holds every token that the target's does.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vllm_specplugins.draft import Offer
from vllm_specplugins.engine.hooks import both


class DeviceOffer:
    """What vLLM's own speculator drafted in a step, still on the device."""

    def __init__(self, drafts: torch.Tensor, stopwatch: "_Stopwatch"):
        self._drafts, self._stopwatch = drafts, stopwatch

    def of(self, rows: Sequence[int]) -> Offer:
        """The drafts for these rows of the batch; waits for them."""
        token_ids = self._drafts.to("cpu", torch.int32).numpy()[rows]
        return Offer(token_ids, self._stopwatch.ms())


def run_before(theirs: Any, ours: Any) -> Any:
    """vLLM's own speculator, changed so that ours gets its drafts and has the last word.

    The runner deals with vLLM's own, whose layers and KV cache it has to prepare.
    """
    propose = theirs.propose

    def offer(*args: Any, **kwargs: Any) -> DeviceOffer:
        stopwatch = _Stopwatch(ours.device)
        drafts = propose(*args, **kwargs)
        stopwatch.stop()
        most = kwargs.get("num_speculative_tokens")  # behind so many it drafts nothing, and leaves no tokens
        return DeviceOffer(drafts[:, :most], stopwatch)

    def propose_both(input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> torch.Tensor:
        theirs_now = partial(offer, input_batch, *args, dummy_run=dummy_run, **kwargs)
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


class _Stopwatch:
    """How long the device took for what was launched between start and `stop`."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._marks = [self._mark()]

    def stop(self) -> None:
        self._marks.append(self._mark())

    def ms(self) -> float:
        """After the device has got there."""
        start, end = self._marks
        ms: float = start.elapsed_time(end) if self._is_cuda else (end - start) * 1000
        return ms

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
