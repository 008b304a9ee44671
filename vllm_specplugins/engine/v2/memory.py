"""Model Runner V2: accounts for the memory of drafting. Adds the plugin's CUDA graphs to vLLM's estimate before it
allocates the KV cache, and logs the large buffers in one line."""

import copy
import gc
import logging
from functools import partial
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_specplugins.engine.hooks import replaced, wrap

logger = logging.getLogger("vllm.specplugins")
_NUM_SAMPLES = 2  # number of the largest graphs of each depth, as in vLLM's estimate
_LEAST_BYTES = 1 << 20  # smallest size of a graph, as in vLLM's estimate


class FewGraphs(dict[int, Any]):
    """A speculator's graph managers by depth during vLLM's profile, in which each records only its largest graphs."""

    def __init__(self, runner: Any):
        self._runner = runner

    def items(self) -> Any:
        for graphs in self.values():
            graphs.pool = self._runner.cudagraph_manager.pool  # the pool ends with the profile
            graphs._max_full_descs_to_capture, graphs._capture_mem_samples = _NUM_SAMPLES, []
        return super().items()

    def get(self, *_: Any) -> None:
        """Returns None, since no graph is replayed."""

    def missing_bytes(self) -> int:
        """Returns the memory of the graphs that were not recorded; vLLM has measured the other graphs."""
        return sum(
            (sum(map(len, graphs._capture_descs.values())) - len(samples)) * max([_LEAST_BYTES, *samples[1:]])
            for graphs in self.values()
            if (samples := graphs._capture_mem_samples)
        )


def for_warm_up(runner: Any) -> Any:
    """Returns a scheduler's configuration with the number of requests that vLLM verifies at once. Otherwise its warm-up
    would allocate logits of up to 16,384 rows after the KV cache."""
    scheduler, width = copy.copy(runner.scheduler_config), runner.num_speculative_steps + 1
    scheduler.max_num_seqs = max(1, min(scheduler.max_num_seqs, get_max_chunk_logits(runner.vocab_size) // width))
    return scheduler


def attach(runner: Any, speculator: Any) -> None:
    wrap(runner, "profile_cudagraph_memory", partial(_with_drafting, runner, speculator))


def _with_drafting(runner: Any, speculator: Any, estimate: Any) -> int:
    """Adds the plugin's graphs to vLLM's estimate. vLLM frees the graphs and the KV cache of its profile, so the plugin
    also drops them."""
    few = FewGraphs(runner)
    with replaced(speculator, {"_graphs_of": few}):
        total: int = estimate() + few.missing_bytes()
    few.clear()
    speculator._graphs = None
    speculator.release()
    gc.collect()
    torch.accelerator.empty_cache()
    return total


def tell_buffers(runner: Any, speculator: Any) -> None:
    sizes = buffer_bytes(runner, speculator)
    logger.info(
        "Speculation with num_speculative_tokens=%d and max_num_seqs=%d takes %.2f GiB beyond the KV cache: %s.",
        runner.num_speculative_steps,
        runner.max_num_reqs,
        sum(sizes.values()) / 2**30,
        ", ".join(f"{name} {size / 2**30:.2f}" for name, size in sizes.items()),
    )


def buffer_bytes(runner: Any, speculator: Any) -> dict[str, int]:
    texts = getattr(getattr(speculator, "lookups", None), "texts", None)
    buffers = {
        "tokens of all requests": None if texts is None else texts.histories.token_ids,
        "references": None if texts is None else texts.references,
        "grammar bitmask": runner.structured_outputs_worker.grammar_bitmask,
        "draft logits": speculator.draft_logits,
    }
    return {name: buffer.nbytes for name, buffer in buffers.items() if buffer is not None}
