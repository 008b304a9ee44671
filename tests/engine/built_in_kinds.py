"""Every kind of drafter that vLLM builds in, as small as it gets: a target and what drafts for it, by configuration
alone. Weights are random and go by a parameter's name, so that a target is the same beside any drafter."""

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from families import FAMILIES, SHAPE, VOCAB_SIZE
from shortened import new_folder

V1, V2 = ("v1",), ("v2",)
BOTH = (*V1, *V2)
LLAMA = {**FAMILIES["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}
QWEN3 = {name: value for name, value in FAMILIES["qwen3"].to_dict().items() if name != "layer_types"}
EXPERTS = {**SHAPE, "moe_intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": False}
HEAD = {**LLAMA, "num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
PARALLEL = {"parallel_drafting": True}
DFLASH = {"mask_token_id": 5, "target_layer_ids": [0, 2]}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}
LATTICE = {
    "block_size": 8, "lilicorr_hidden_size": 32, "lilicorr_candidate_topk": 4, "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2, "lilicorr_factor_dim": 8, "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 1.0,
    "lilicorr_num_layers": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A method of vLLM's, its model, settings of the stage, and the target; None: the target holds the drafter."""

    method: str
    model: dict[str, Any] | None
    target: dict[str, Any] = field(default_factory=lambda: LLAMA)
    settings: dict[str, Any] = field(default_factory=dict)
    runners: tuple[str, ...] = BOTH


def parallel(architecture: str, **more: Any) -> dict[str, Any]:
    config = {**QWEN3, "architectures": [architecture], "num_hidden_layers": 1}
    return {**config, "dflash_config": {**DFLASH, **more}}


def mixture(name: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {**EXPERTS, "model_type": name, "architectures": [architecture], "num_nextn_predict_layers": 1, **more}


GEMMA4 = {
    **SHAPE, "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0, "global_head_dim": 32, "num_global_key_value_heads": 2,
}  # fmt: skip
MIMO = {**FAMILIES["qwen2"].to_dict(), "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
ASSISTANT = {
    "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "vocab_size": VOCAB_SIZE,
    "text_config": {**GEMMA4, "num_kv_shared_layers": 2}, "backbone_hidden_size": 64,
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "draft_model": Kind("draft_model", {**LLAMA, "num_hidden_layers": 1}),
    "PARD": Kind("draft_model", {**LLAMA, "num_hidden_layers": 1, "pard_token": 7}, settings=PARALLEL, runners=V1),
    "eagle": Kind("eagle", HEAD),
    "eagle3": Kind("eagle3", HEAD),
    "P-EAGLE": Kind("eagle3", {**HEAD, "ptd_token_id": 7}, settings=PARALLEL, runners=V1),
    "dflash": Kind("dflash", parallel("DFlashDraftModel")),
    "DFlash2": Kind("dflash", parallel("DFlash2DraftModel", **SELECTOR), runners=V2),
    "LiLiCorr": Kind("dflash", parallel("LiLiCorrDraftModel", **LATTICE), runners=V2),
    "dspark": Kind(
        "dspark", parallel("Qwen3DSparkModel") | {"markov_rank": 8, "enable_confidence_head": True}, runners=V2
    ),
    "mtp of MiMo": Kind("mtp", None, MIMO),
    "mtp of GLM 4 MoE": Kind(
        "mtp", None, mixture("glm4_moe", "Glm4MoeForCausalLM", n_routed_experts=4, num_experts_per_tok=2)
    ),
    "mtp of ERNIE 4.5": Kind(
        "mtp", None, mixture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2)
    ),
    "mtp of EXAONE MoE": Kind(
        "mtp", None, mixture("exaone_moe", "ExaoneMoEForCausalLM", num_experts=4, num_experts_per_tok=2)
    ),
    "mtp of Gemma 4": Kind("mtp", ASSISTANT, GEMMA4),
}


def folder_of(config: dict[str, Any]) -> str:
    """A checkpoint of a configuration alone, with `load_format="dummy"`; it is removed when the process ends."""
    folder = new_folder("kind")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, default=str))
    return str(folder)


@contextmanager
def weights_by_name() -> Iterator[None]:
    """Dummy weights that let a model say something."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    original = DummyModelLoader.load_weights
    DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)
    try:
        yield
    finally:
        DummyModelLoader.load_weights = original


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    for name, weight in model.state_dict().items():
        if not weight.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if weight.ndim < 2:
            one = float("norm" in name or "scalar" in name)
            weight.copy_(one + one * 0.1 * torch.randn(weight.shape, generator=generator))
            continue
        std = 1.0 if "embed" in name else 2.0 / math.sqrt(weight.shape[-1])
        weight.copy_(std * torch.randn(weight.shape, generator=generator))
    for part in model.modules():
        if hasattr(part, "_build_fused_kv_buffers"):
            part._build_fused_kv_buffers()
        if hasattr(part, "materialize_inference_buffers"):
            part.materialize_inference_buffers(torch.device("cpu"), torch.float32)
