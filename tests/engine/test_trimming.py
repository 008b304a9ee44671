"""Graphs of a target whose drafts are trimmed on the device, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import RUNNER

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="of V2")
WITHOUT_TAPES = "has no engine"
K, MAX_NUM_REQS = 3, 4


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, of graphs of any lengths up to K + 1."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    rank = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: rank)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None)
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_NUM_REQS),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 4, 8, 16], max_cudagraph_capture_size=16),
        speculative_config=None,
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    made = cudagraph_utils.CudaGraphManager(config, "cpu", CUDAGraphMode.FULL_DECODE_ONLY, K + 1, varlen_decode=True)
    made._graphs_captured = True
    return made


def test_steps_without_drafts(manager: Any) -> None:
    """With TRITON_ATTN, steps of one token per request have graphs of their own, which split long texts. Kills: a step
    without drafts in a graph of K + 1 tokens; one with drafts in a graph of one; a graph that is never recorded."""
    from vllm_specplugins.engine.adaptive.trimming import record_single_tokens

    sizes = [desc.num_tokens for descs in manager._capture_descs.values() for desc in descs]
    record_single_tokens(manager)
    recorded = [desc for descs in manager._capture_descs.values() for desc in descs]
    assert [desc.num_tokens for desc in recorded] == [size for size in sizes for _ in range(2)] and sizes
    for num_reqs in range(1, MAX_NUM_REQS + 1):
        for width in range(1, K + 2):
            desc = manager.dispatch(num_reqs, num_reqs * width, None, 0, max_query_len=width)
            assert desc in recorded and desc.max_query_len == (1 if width == 1 else K + 1)
        assert manager.dispatch(num_reqs, num_reqs, None, 0).cg_mode.name == "NONE"
