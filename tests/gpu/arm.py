"""What an engine of this process says of itself: each arm of tests/gpu.sh prints it."""

import logging
from collections import Counter
from typing import Any

# For an engine in this process, of which stdout holds what is reported alone.
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


class Findings(logging.Handler):
    """Warnings of the plugin: what a self-check found, a proposer that was switched off, drafts that nothing trims."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        for name in ("vllm.specplugins", "vllm_specplugins"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a sentence."""
        self.sentences.append(record.getMessage().replace("\n", " "))


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def num_blocks(llm: Any) -> int:
    return int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks or 0)


def graphs_of(runner: Any) -> str:
    """How many CUDA graphs the target has by kind, and the drafting by depth."""
    managers = {"target": getattr(runner, "cudagraph_manager", None)}
    speculator = getattr(runner, "speculator", None)
    managers |= {
        f"drafts, depth {depth}": manager
        for depth, manager in getattr(getattr(speculator, "specplugins", speculator), "_graphs_of", {}).items()
    }
    kinds = (
        (name, Counter(key.cg_mode.name for key in manager.graphs)) for name, manager in managers.items() if manager
    )
    return "; ".join(f"{name}: {', '.join(f'{kind} {n}' for kind, n in own.items()) or 'none'}" for name, own in kinds)


def accepted_by_position(llm: Any) -> list[float]:
    """The share of drafts of which the token at each position was accepted."""
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode")}
    if "vllm:spec_decode_num_drafts" not in found or not found["vllm:spec_decode_num_drafts"].value:
        return []
    num_drafts = found["vllm:spec_decode_num_drafts"].value
    return [value / num_drafts for value in found["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


def describe(llm: Any, findings: Findings) -> list[str]:
    """Lines about an engine that has served."""
    runner, is_ours = runner_of(llm), hasattr(llm.llm_engine.vllm_config.speculative_config, "plugin_config")
    lines = [
        f"trims: {'yes' if getattr(runner, 'adaptive_verification', None) is not None else 'no'}",
        f"graphs: {graphs_of(runner) or 'none'}",
        f"KV blocks: {num_blocks(llm)}",
        f"warnings: {' / '.join(findings.sentences) or 'none'}",
    ]
    if is_ours:
        lines.append(f"faults: {llm.collective_rpc('specplugins_stats')[0]['faults'] or 'none'}")
    if rates := accepted_by_position(llm):
        lines.append("accepted by position: " + " ".join(f"{rate:.2f}" for rate in rates))
    return lines


def costs(llm: Any, sizes: tuple[int, ...] = (1, 8, 32, 64, 256)) -> str:
    """vLLM's table of what a step of so many tokens takes, where drafts are trimmed."""
    manager = getattr(runner_of(llm), "adaptive_verification", None)
    if manager is None:
        return "no table"
    table = manager.cost_tables[1]
    return ", ".join(f"{size}: {table[size]:.2f}" for size in sizes if size < len(table))
