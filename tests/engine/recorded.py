"""What an engine of this process has recorded: its runner, and the graphs of target and drafts."""

from typing import Any

import torch


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def replays(manager: Any) -> int:
    """Of all graphs of one of vLLM's managers; none without tapes, or where nothing is recorded."""
    graphs = manager.graphs.values() if manager is not None else ()
    return sum(getattr(graph, "num_replays", 0) for graph in graphs)


def recapture(device: Any, speculator: Any) -> None:
    """Records the drafting graphs anew."""
    from vllm.config.compilation import CUDAGraphMode

    with device.guard.active(), torch.inference_mode():
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        speculator.capture()


def drafts_pay(llm: Any) -> None:
    """Costs of steps as of a device on which drafts pay, for who trims them, in place of a simulation's times."""
    costs = [(n, 8 + 0.001 * n) for n in range(1, 4097)]
    runner(llm).adaptive_verification.set_cost_curves([(1, 0.1), (8, 0.1)], costs)
