"""A start as users start it, of a model of a served shape with dummy weights: its time, its KV blocks, its costs.

    python tests/gpu/start.py CONFIG --shape qwen3-8b --folder FOLDER --plain FILE

CONFIG: a --speculative-config, or `null`, which is run first: FILE keeps its KV blocks and seconds. Nothing is
downloaded; FOLDER gets the model's configuration. What the model says means nothing, so nothing is told of acceptance.
"""

import argparse
import json
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "head_dim": 64}
# "tiny" is for trying this program out.
SHAPES = {
    "llama-3.1-8b": LLAMA,
    "qwen3-8b": QWEN,
    "tiny": {**LLAMA, **TINY, "num_key_value_heads": 2, "vocab_size": 3072, "max_position_embeddings": 1024},
}


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


def write_config(folder: Path, shape: str) -> str:
    """A folder with the configuration of a shape."""
    own = folder / shape
    own.mkdir(parents=True, exist_ok=True)
    (own / "config.json").write_text(json.dumps(SHAPES[shape]))
    return str(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=json.loads)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--plain", type=Path, required=True, help="KV blocks and seconds of no speculation")
    parser.add_argument("--engine-args", type=json.loads, default={})
    args = parser.parse_args()
    os.environ |= QUIET
    from vllm import LLM, SamplingParams

    findings, began = Findings(), time.perf_counter()
    model, dummy = write_config(args.folder, args.shape), {"load_format": "dummy", "skip_tokenizer_init": True}
    llm = LLM(model, speculative_config=args.config, disable_log_stats=False, **{**dummy, **args.engine_args})
    seconds = time.perf_counter() - began
    blocks = num_blocks(llm)
    if args.config is None:
        args.plain.write_text(json.dumps({"blocks": blocks, "seconds": seconds}))
    name = json.dumps(args.config)
    print(f"{args.shape}, `{name}`: {seconds:.0f} s, {blocks} KV blocks", end="", flush=True)
    if args.plain.exists():
        plain = json.loads(args.plain.read_text())
        print(
            f"; {blocks / plain['blocks']:.3f} of the blocks and {seconds - plain['seconds']:+.0f} s of none's", end=""
        )
    print(f"\n* ms of a step by tokens: {costs(llm)}", flush=True)
    prompts = [{"prompt_token_ids": [7, 8, 9, 10] * 16}] * 8
    llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True, detokenize=False), use_tqdm=False)
    print("\n".join(f"* {line}" for line in describe(llm, findings)), flush=True)


if __name__ == "__main__":
    main()
