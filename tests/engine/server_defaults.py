"""A program: the configurations that servers with vLLM's defaults have on an H100, an A100 of 40 GB and a GPU of 24 GB,
as vLLM's CUDA platform builds them, without a device.

    python tests/engine/server_defaults.py FOLDER

prints a row of JSON for each: device, LoRA, TP, method, and K and vLLM's sizes or the refusal. FOLDER gets the trained
parts, and configurations of models without weights.
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
DEVICES = {  # name, GiB, compute capability
    "H100": ("NVIDIA H100 80GB HBM3", 79.2, (9, 0)),
    "A100": ("NVIDIA A100-PCIE-40GB", 39.4, (8, 0)),
    "24 GB": ("NVIDIA L4", 22.0, (8, 9)),
}
MODEL = {  # a Llama as narrow as its parts are small, with the vocabulary of Qwen3
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 151_936,
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 36, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 40_960, "tie_word_embeddings": False,
}  # fmt: skip
EAGLE3 = {**MODEL, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}


def on_device() -> dict[str, Any]:
    """Makes vLLM take this machine for one with eight GPUs; the result says which."""
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms, triton_utils

    triton_utils.HAS_TRITON = True  # or else vLLM leaves V2 out
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    device: dict[str, Any] = {}

    class Pretended(NonNvmlCudaPlatform):
        get_device_name = classmethod(lambda cls, device_id=0: device["name"])
        get_device_total_memory = classmethod(lambda cls, device_id=0: device["bytes"])
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*device["capability"]))
        device_count = classmethod(lambda cls: 8)
        is_fully_connected = classmethod(lambda cls, ids: True)

    platforms.current_platform = Pretended()
    return device


def inspect_models() -> None:
    """Has vLLM write down of which kind the models are, in a process that knows what machine this is."""
    names = EAGLE3["architectures"] + MODEL["architectures"]
    code = "from vllm.model_executor.models.registry import ModelRegistry as models\n"
    code += f"for name in {names}: models.models[name].inspect_model_cls()"
    from vllm.model_executor.models.registry import ModelRegistry

    try:
        for name in names:
            ModelRegistry.models[name].inspect_model_cls()
    except Exception:  # it is not written down yet
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def methods(folder: Path) -> dict[str, Any]:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "examples/demo")]
    from parts import medusa, write_head

    sizes = {"num_layers": MODEL["num_hidden_layers"], "hidden_size": MODEL["hidden_size"]}
    parts = [write_head(folder / "jump", 9, 18, 0.0, **sizes), medusa(folder / "medusa", sizes["hidden_size"])]
    for part in parts:
        part.pop("num_speculative_tokens")
    exits, head = {"method": "early_exit", "exit_layer": 9}, written(folder / "eagle3", EAGLE3)
    documented = {"method": "eagle3", "model": head, "num_speculative_tokens": 4}
    return {
        "prompt_lookup": {"method": "prompt_lookup"},
        "K = 31": {"method": "prompt_lookup", "num_speculative_tokens": 31},
        "suffix_lookup": {"method": "suffix_lookup"},
        "early_exit": exits,
        "tree": {**exits, "tree": 15},
        "jump": parts[0],
        "medusa": parts[1],
        "lookahead": {"method": "lookahead"},
        "grammar": {"method": "grammar"},
        "remote": {"method": "remote", "url": "http://localhost:1", "model": "m"},
        "custom": {"method": "custom", "proposer": "vllm_specplugins.proposers.grammar:Grammar"},
        "cascade": {"method": "cascade", "stages": ["prompt_lookup", exits]},
        "documented": {"method": "cascade", "num_speculative_tokens": 12, "stages": ["prompt_lookup", documented]},
        "documented, no K": {"method": "cascade", "stages": ["prompt_lookup", documented]},
    }


def main(folder: Path) -> None:
    device = on_device()
    inspect_models()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    model, configs = written(folder / "model", MODEL), methods(folder)
    for name, lora, ranks in product(DEVICES, (False, True), (1, 4)):
        device |= dict(zip(("name", "bytes", "capability"), DEVICES[name], strict=True))
        device["bytes"] = int(device["bytes"] * 2**30)
        for method, spec in configs.items():
            row: dict[str, Any] = {"device": name, "lora": lora, "tp": ranks, "method": method}
            arguments: dict[str, Any] = {
                "enable_lora": lora,
                "tensor_parallel_size": ranks,
                "skip_tokenizer_init": True,
            }
            try:
                built = EngineArgs(model=model, speculative_config=spec, **arguments).create_engine_config(
                    UsageContext.OPENAI_API_SERVER
                )
                scheduler = built.scheduler_config
                row |= {"seqs": scheduler.max_num_seqs, "tokens": scheduler.max_num_batched_tokens}
                row |= {"v2": built.use_v2_model_runner, "k": built.num_speculative_tokens}
            except Exception as error:
                row |= {"refused": type(error).__name__, "why": str(error)}
            print("ROW", json.dumps(row), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
