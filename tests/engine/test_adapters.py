"""LoRA: drafts and verification run the adapter of each request, in batches that mix adapters."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import WITH_ADAPTERS, adapter
from cases import SUFFIX_LOOKUP, early_exit, progress
from conftest import ALL, INTERPRETED, counted, long, spec_metrics
from families import EXIT_LAYER, NUM_LAYERS, SHAPE, VOCAB_SIZE, checkpoint
from parts import write_head

NUM_TOKENS = 11 if INTERPRETED else 21  # one from the prompt and whole steps of K + 1, so that no draft is cut
WITHOUT_TAPES = "vLLM's LoRA for CPUs reads the mapping on the host, which a graph does not see"

Outputs = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> Outputs:
    """Two of each adapter and of none, one of them long; both of a pair are the same, and repeat themselves."""
    rng = random.Random(0)
    pairs = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 70)]
    return [pair * 2 for pair in pairs for _ in range(3)]


def generate(llm: Any, prompts: Outputs, salt: str | None = None, has_head: bool = False, **sampling: Any) -> Outputs:
    """Outputs of one batch; the first prompt's request has no adapter, the second's one, the third's another, ..."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    requests = [None, *(LoRARequest(f"adapter {seed}", seed, str(adapter(seed, has_head))) for seed in (1, 2))]
    params = SamplingParams(
        **{"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "detokenize": False, **sampling}
    )
    own = {"cache_salt": salt} if salt else {}
    inputs = [{"prompt_token_ids": prompt, **own} for prompt in prompts]
    adapters = [requests[index % len(requests)] for index in range(len(prompts))]
    results = llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)
    return [list(result.outputs[0].token_ids) for result in results]


def start(engine: Any, config: dict[str, Any] | None, **arguments: Any) -> Any:
    return engine(config, model=str(checkpoint("llama")), skip_tokenizer_init=True, **WITH_ADAPTERS, **arguments)


@pytest.fixture(scope="module")
def plain(engine: Any, prompts: Outputs) -> Outputs:
    outputs = generate(start(engine, None), prompts)
    assert all(len({tuple(output) for output in outputs[pair : pair + 3]}) == 3 for pair in (0, 3)), "adapters matter"
    return outputs


def jump_over_nothing(folder: Path) -> dict[str, Any]:
    """Half of the layers, and the other half behind them."""
    sizes = {"num_layers": NUM_LAYERS, "hidden_size": SHAPE["hidden_size"]}
    return write_head(folder, NUM_LAYERS // 2, NUM_LAYERS // 2, 0.0, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["early_exit", *([] if INTERPRETED else ["jump"])])
def test_all_layers_accept_everything(
    engine: Any, prompts: Outputs, plain: Outputs, method: str, tmp_path: Path
) -> None:
    """The invariant, in a batch of both adapters and none. Fails if drafts run one adapter for all rows, or in another
    order."""
    llm = start(engine, early_exit(NUM_LAYERS) if method == "early_exit" else jump_over_nothing(tmp_path))
    outputs, drafted, accepted = counted(llm, lambda: generate(llm, prompts))
    assert outputs == plain and accepted == drafted >= len(prompts) * (NUM_TOKENS - 1) * 4 // 5


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED and not ALL, reason="SPECPLUGINS_TESTS=all: as on V1")
@pytest.mark.parametrize("stages", [(), long(("prompt_lookup", {"method": "early_exit", "exit_layer": EXIT_LAYER}))])
def test_default_length(engine: Any, prompts: Outputs, plain: Outputs, stages: Any) -> None:
    """A server with LoRA whose tokens and requests have the ratio of vLLM's defaults for GPUs, in a batch of both
    adapters and none. Fails if it does not start, or if K is not the largest that vLLM allows."""
    config = {"method": "cascade", "stages": list(stages)} if stages else {"method": "prompt_lookup"}
    llm = engine(
        {**config, "gate": "off"},
        model=str(checkpoint("llama")),
        skip_tokenizer_init=True,
        **WITH_ADAPTERS,
        **{"max_num_seqs": 16, "max_num_batched_tokens": 128},
    )
    assert llm.llm_engine.vllm_config.num_speculative_tokens == 7
    outputs, drafted, _ = counted(llm, lambda: generate(llm, prompts))
    assert outputs == plain and drafted > 0


CASCADE = {
    "method": "cascade",
    "num_speculative_tokens": 4,
    "policy": "verify",
    "gate": "off",
    "stages": [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": EXIT_LAYER}],
}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED and not ALL, reason="SPECPLUGINS_TESTS=all: as on V1")
@pytest.mark.parametrize("config", [CASCADE, SUFFIX_LOOKUP], ids=lambda config: config["method"])
def test_output(engine: Any, prompts: Outputs, plain: Outputs, config: dict[str, Any]) -> None:
    """Drafts of several tokens at once, some accepted and some not. Fails if the next step runs the drafts' mapping, or
    if an adapter's outputs are drafted for another tenant's requests with that adapter."""
    llm, accepted = start(engine, config), [0]
    for salt in (None, "another", None):
        assert generate(llm, prompts, salt) == plain
        accepted.append(progress(llm)[1])
    in_turn = np.diff(accepted)
    assert in_turn[1] == in_turn[0] and in_turn[2] > (in_turn[0] if config is SUFFIX_LOOKUP else 0)
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {} and 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("config", [CASCADE, SUFFIX_LOOKUP], ids=lambda config: config["method"])
def test_preempted(engine: Any, prompts: Outputs, config: dict[str, Any]) -> None:
    """Adapters of the target's head, too, prompts in chunks, and too few blocks. Fails if a request that comes back is
    drafted for with another one's adapter."""
    scarce = {"num_gpu_blocks_override": 10, "max_model_len": 160, "max_num_batched_tokens": 48}
    own = {"has_head": True, "max_tokens": 40}
    expected = generate(start(engine, None, **scarce), prompts, **own)
    llm = start(engine, config, **scarce)
    assert generate(llm, prompts, **own) == expected == generate(llm, prompts, **own)
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {} and stats["drafted_tokens"] > 0 and spec_metrics(llm)["preemptions"] > 0
