"""Model Runner V2: CUDA graphs of drafting, one for each batch size, of vLLM's own making."""

from collections.abc import Callable
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp


def graphs_of_rows(vllm_config: Any, device: Any) -> CudaGraphManager:
    """None recorded yet: of work on the rows of a batch in which attention has no part."""
    return CudaGraphManager(vllm_config, device, CUDAGraphMode.FULL_DECODE_ONLY, decode_query_len=1)


def record(graphs: CudaGraphManager, work: Callable[[int], Any]) -> None:
    """Records `work(number of rows)`."""

    def forward_of(batch: Any, warmup: bool) -> Callable[[CUDAGraphMode], Any]:
        return lambda mode: work(batch.num_reqs)

    graphs.capture(forward_of, "Capturing drafting CUDA graphs")


def graph_for(graphs: CudaGraphManager, num_reqs: int) -> Any:
    """Which of the graphs is for a batch of this size, perhaps with rows of padding; None if none is."""
    batch, _ = dispatch_cg_and_sync_dp(graphs, num_reqs, num_reqs, uniform_token_count=1, dp_size=1, dp_rank=0)
    return batch if batch.cg_mode == CUDAGraphMode.FULL else None


def replayed(graphs: CudaGraphManager | None, num_reqs: int) -> bool:
    """Replays the graph for a batch of this size, if there is one."""
    if graphs is None or (graph := graph_for(graphs, num_reqs)) is None:
        return False
    graphs.run_fullgraph(graph)
    return True
