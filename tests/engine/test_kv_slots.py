"""Where early exit writes keys and values: into slots past its own requests' tokens, and nowhere else.

The whole KV cache is compared before and after every drafting step, with the scheduler's own record of which request
holds which block, while the cache is full to the last block.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from cases import early_exit
from conftest import INTERPRETED, NUM_LAYERS
from families import EXIT_LAYER, checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="reads the layout of vLLM's CPU attention"),
]

LONG = not INTERPRETED or os.environ.get("SPECPLUGINS_SIMULATED") == "all"
BLOCK_SIZE = 32
MAX_MODEL_LEN = 3 * BLOCK_SIZE
SMALL: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 64,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "enforce_eager": True,  # a graph's writes are not seen step by step
    "async_scheduling": False,  # or else the scheduler counts tokens that no step has computed yet
}
# One block for nobody and the rest for little more than one request of full length. Gemma 3 has four KV-cache groups,
# whose requests mostly take four blocks at a time.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "demo": (early_exit(NUM_LAYERS // 2, 8), {**SMALL, "num_gpu_blocks_override": 9}),
    "gemma3": (early_exit(EXIT_LAYER, 8), {**SMALL, "num_gpu_blocks_override": 21, "skip_tokenizer_init": True}),
}


class Watch:
    """Stands between a runner and its proposer, and notes what every drafting step writes to the KV cache."""

    def __init__(self, llm: Any, monkeypatch: pytest.MonkeyPatch):
        core = llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        worker = core.model_executor.driver_worker.worker
        # Layers of several groups share memory.
        self._caches = {cache.data_ptr(): cache for cache in worker.model_runner.kv_caches}.values()
        self._written: list[tuple[Any, int]] = []  # of the running step: request, position
        self.num_written = self.num_full_steps = self.num_last_slots = 0
        self.violations: list[str] = []
        speculator = getattr(worker.model_runner, "speculator", None)
        if speculator is None:
            propose = worker._barrier.propose
            monkeypatch.setattr(
                worker._barrier,
                "propose",
                lambda batch, feedback: self._watched(partial(propose, batch, feedback), batch.request_ids),
            )
        else:
            draft_step = speculator._draft_step
            monkeypatch.setattr(
                speculator,
                "_draft_step",
                lambda batch, *rest: self._watched(partial(draft_step, batch, *rest), batch.req_ids),
            )

    def _watched(self, propose: Callable[[], Any], request_ids: Sequence[str]) -> Any:
        before = [cache.clone() for cache in self._caches]
        draft = propose()
        full = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
        self.num_full_steps += full
        holders = self._holders()
        for block, slots in self._changes(before).items():
            # Block 0 is nobody's: vLLM lets block tables point to it where nothing may be read. Rows that pad a batch
            # have slot -1, which is not written, so that not even they have a reason to write there.
            held = holders.get(block, [])
            if not any(request.request_id in request_ids for request, _, _ in held):
                self.violations.append(f"block {block}, which no request of the batch holds")
            for request, start, is_last in held:
                self._written += [(request, start + slot) for slot in slots]
                self.num_last_slots += full and is_last and BLOCK_SIZE - 1 in slots
        return draft

    def _holders(self) -> dict[int, list[tuple[Any, int, bool]]]:
        """Block -> the requests that hold it, the position of its first slot, and whether it is their last."""
        holders: dict[int, list[tuple[Any, int, bool]]] = {}
        for request in self._scheduler.running:
            for blocks in self._scheduler.kv_cache_manager.get_block_ids(request.request_id):
                for index, block in enumerate(blocks):
                    if block != 0:
                        entry = (request, index * BLOCK_SIZE, index == len(blocks) - 1)
                        holders.setdefault(block, []).append(entry)
        return holders

    def _changes(self, before: list[torch.Tensor]) -> dict[int, set[int]]:
        """Block -> slots that are not what they were."""
        changes: dict[int, set[int]] = {}
        for old, cache in zip(before, self._caches, strict=True):
            num_blocks, num_kv_heads = cache.shape[:2]
            # Within a block and a head: keys, in an order of the CPU's own, then values [slot, head_dim].
            changed = (old != cache).reshape(num_blocks, num_kv_heads, 2, BLOCK_SIZE, -1)
            for block in changed.flatten(1).any(1).nonzero().flatten().tolist():
                changes.setdefault(block, set())
            for block, slot in changed[:, :, 1].any(-1).any(1).nonzero().tolist():
                changes[block].add(slot)
        return changes

    def settle(self) -> None:
        """After an engine step, when the scheduler knows how many tokens it has computed for good."""
        for request, position in self._written:
            if position < request.num_computed_tokens:
                self.violations.append(f"position {position} of {request.num_computed_tokens} computed ones")
        self.num_written += len(self._written)
        self._written.clear()


def run_watched(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Serves more requests than the cache can hold, some with a common prefix, one to the end of its context."""
    from vllm import SamplingParams

    watch, core = Watch(llm, monkeypatch), llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, detokenize=False)
    common = list(range(5, 5 + BLOCK_SIZE))
    prompts = [[*common, *range(50, 50 + n)] for n in (1, 5, 9, 40, 60)]
    prompts += [list(range(100 + n, 100 + 2 * n)) for n in (20, 25, 30, 31, 32, 33, 90)]
    for index, prompt in enumerate(prompts):
        core.add_request(f"slots-{index}", {"prompt_token_ids": prompt}, params)
    while core.has_unfinished_requests():
        core.step()
        watch.settle()
    return watch


@pytest.mark.parametrize("model", MODELS if LONG else ["demo"])
def test_full_cache(engine: Any, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Kills: no lookahead slots; positions from before the last token; no clamp at the end of the context."""
    config, arguments = MODELS[model]
    if model != "demo":
        arguments = {**arguments, "model": str(checkpoint(model))}
    watch = run_watched(engine(config, **arguments), monkeypatch)
    assert watch.violations == []
    assert watch.num_written > 200
    assert watch.num_full_steps > 0 and watch.num_last_slots > 0, "drafts must reach the end of a full cache"


def test_without_lookahead_slots(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: no slots reserved for drafts, planted, and drafts write into foreign blocks."""
    from vllm_specplugins.engine.frontend.spec_config import PluginVllmConfig

    monkeypatch.setattr(PluginVllmConfig, "num_lookahead_tokens", 0)
    config, arguments = MODELS["demo"]
    watch = run_watched(engine(config, **arguments, seed=1), monkeypatch)  # the seed: an engine of its own
    assert any("no request of the batch holds" in violation for violation in watch.violations)
