"""A start as users start it, of a model of a served shape with dummy weights: its time, its KV blocks, its costs.

    python tests/gpu/start.py CONFIG --shape qwen3-8b --folder FOLDER --plain FILE

CONFIG: a --speculative-config, or `null`, which is run first: FILE keeps its KV blocks and seconds. Nothing is
downloaded; FOLDER gets the model's configuration. What the model says means nothing, so nothing is told of acceptance.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from arm import QUIET, Findings, costs, describe, num_blocks

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
