"""Targets of which some layers keep a state that every token changes, with lookups on V2: what a rejected draft did to
it must be undone. vLLM does that with kernels of a GPU, which run interpreted here (simulated_device/state_kernels.py).
"""

import functools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from built_in_kinds import folder_of, weights_by_name
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, cascade, generate
from conftest import RUNNER, long_on_v2, spec_metrics
from families import SHAPE, VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RUNNER == "v1", reason="on a CPU vLLM does not wind states back")]
WITHOUT_TAPES = "vLLM's kernels for a prompt's states read it on the host"

NUM_TOKENS = 14
LENGTHS = (5, 60, 40, 57, 33, 12)
SMALL = {**SHAPE, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6}
KINDS: dict[str, dict[str, Any]] = {
    "mamba2": {
        **SMALL, "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["mamba", "attention"], "shared_intermediate_size": 128, "num_local_experts": 0,
        "num_experts_per_tok": 0, "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_n_groups": 1,
        "mamba_d_state": 16, "mamba_chunk_size": 32, "attention_multiplier": 0.18, "position_embedding_type": "rope",
    },
    "gated_delta_net": {
        **SMALL, "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_nextn_predict_layers": 1,
    },
    "short_conv": {
        **SMALL, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_multiple_of": 64,
        "layer_types": ["conv", "full_attention"], "conv_dim": 64, "conv_dim_out": 64, "block_dim": 64,
        "block_ff_dim": 128, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip
LOOKUP = {"method": "prompt_lookup"}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("mamba2", LOOKUP),
    **{kind: (kind, PROMPT_LOOKUP) for kind in ("gated_delta_net", "short_conv")},
    "suffix_lookup": ("short_conv", SUFFIX_LOOKUP),
    "mtp": ("gated_delta_net", cascade("auto", stages=(LOOKUP, MTP)) | {"time_budget_ms": 60_000}),
}
# States of some requests, 1 + K each, and their text, until one grows; states are a part of the prefix cache, too.
TIGHT = {"enable_prefix_caching": True, "max_num_batched_tokens": 64}
NUM_BLOCKS = {"mtp": 20}


@pytest.fixture(autouse=True, scope="module")
def states(engine: Any) -> Iterator[None]:
    """Random weights, and a platform whose kernels wind states back."""
    from simulated_device.state_kernels import state_kernels

    with weights_by_name(), state_kernels():
        yield
        engine.stop()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def plain(engine: Any, prompts: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """plain(kind): the target's outputs without speculation."""
    return functools.cache(lambda kind: generate(engine(**settings(kind)), prompts, [8], max_tokens=NUM_TOKENS))


@functools.cache
def settings(kind: str) -> dict[str, Any]:
    return {"model": folder_of(KINDS[kind]), "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 128}


def run(llm: Any, prompts: list[list[int]], expected: list[list[int]]) -> list[list[int]]:
    """Outputs where each request has a reference of what it says, with wrong tokens, which each has elsewhere."""
    from vllm import SamplingParams

    params = []
    for request, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        wrong = range(2 + request, len(tokens), 3 + request)
        tokens = [(token + 1) % VOCAB_SIZE if place in wrong else token for place, token in enumerate(tokens)]
        own = {"specplugins": {"reference": [*prompt[-2:], *tokens]}}
        params.append(SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True, extra_args=own))
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("name", [long_on_v2(name) if name in ("mamba2", "mtp") else name for name in RUNS])
def test_outputs(engine: Any, prompts: list[list[int]], plain: Any, name: str) -> None:
    """Identical at temperature 0, with drafts of which some tokens are accepted, with prompts in pieces, and from the
    prefix cache. Fails if a state is taken after the draft's end, after its first token, or from another request."""
    kind, config = RUNS[name]
    expected = plain(kind)
    llm = engine(config, **settings(kind), **TIGHT, num_gpu_blocks_override=NUM_BLOCKS.get(name, 22))
    assert run(llm, prompts, expected) == expected
    if name != "gated_delta_net":  # slow
        assert run(llm, prompts, expected) == expected, "from the prefix cache"
    metrics = spec_metrics(llm)
    assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"]
    assert metrics["preemptions"] > 0, metrics
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}


def test_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Fails if the log counts a state for a token that is not verified, or that of one layer for all."""
    from vllm.v1.kv_cache_interface import MambaSpec

    from vllm_specplugins.engine.metrics.report import tell_states

    spec = MambaSpec(shapes=((1 << 18,),), dtypes=(torch.float32,), block_size=32, num_speculative_blocks=5)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["0", "2", "3"])
    config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"), num_speculative_tokens=5)
    with caplog.at_level("INFO", logger="vllm.specplugins"):
        tell_states(config, SimpleNamespace(kv_cache_groups=[group]), "prompt_lookup")
    assert "18.00 MiB per request, of which 15.00 MiB are for num_speculative_tokens 5." in caplog.text
