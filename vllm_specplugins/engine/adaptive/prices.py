"""Model Runner V2: the time that a draft token takes, measured in vLLM's profile at a start.

vLLM's profile times requests of one token with 8,192 tokens of context each, so its table prices a draft token as one
more request. But a draft token reads no keys and values beyond its request's newest token. The table's batches
therefore have no context here, and four more batches measure the time that a context adds per request, which reads it,
and per draft token, which attends to it. VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN turns this off.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from vllm import envs
from vllm.distributed.parallel_state import get_tp_group

_CONTEXT_LEN = "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
_REPLAYS = 5  # of each batch; their median counts


class Prices(NamedTuple):
    """Milliseconds per token of context: of a request that reads it, and of a draft token that attends to it."""

    read_ms: float = 0.0
    attend_ms: float = 0.0


def measure_prices(manager: Any, max_model_len: int, use: Callable[[Prices], None]) -> None:
    """Makes vLLM's profile measure prices and calls `use` with them; all ranks get the same ones. `manager` is vLLM's,
    of adaptive verification."""
    if envs.is_set(_CONTEXT_LEN):
        return
    theirs, set_theirs = manager.batches_to_profile, manager.set_initial_cost_curves
    width = manager.num_speculative_steps + manager.num_bonus_tokens
    context_len = min(envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN, max_model_len - width)

    def batches_to_profile(capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        for batch in theirs(capture_sizes):
            yield {**batch, "context_len": 0}
        req_states = manager.req_states
        limit = min(req_states.max_num_reqs, req_states.max_num_batched_tokens // width)
        num_reqs = max(1, min(limit, max(capture_sizes, default=0) // width + 1))  # no graph pads such a batch
        for size in ({"num_tokens": num_reqs}, {"num_tokens": num_reqs * width, "uniform_decode": True}):
            for length in (0, context_len):
                yield from [{**size, "context_len": length}] * _REPLAYS

    def set_initial_cost_curves(samples: list[Any]) -> None:
        ours = [samples[at : at + _REPLAYS] for at in range(len(samples) - 4 * _REPLAYS, len(samples), _REPLAYS)]
        use(get_tp_group().broadcast_object(_prices(ours, context_len), src=0))
        set_theirs(samples[: -4 * _REPLAYS])

    manager.batches_to_profile, manager.set_initial_cost_curves = batches_to_profile, set_initial_cost_curves


def _prices(samples: Sequence[Sequence[Any]], context_len: int) -> Prices:
    """Fits samples of requests of one token and of requests with drafts, each without a context and with one."""
    one, with_one, drafts, with_drafts = (float(np.median([sample.forward_ms for sample in each])) for each in samples)
    (one_reqs, _), (num_reqs, num_tokens) = ((sample.num_reqs, sample.num_target_tokens) for sample, *_ in samples[::2])
    length = max(1, context_len)
    read_ms = max(0.0, with_one - one) / (length * one_reqs)
    rest_ms = (with_drafts - drafts) / length - num_reqs * read_ms
    return Prices(read_ms, max(0.0, rest_ms) / max(1, num_tokens - num_reqs))
