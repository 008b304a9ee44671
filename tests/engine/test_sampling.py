"""Temperatures other than 0: what is sampled has the distribution that it has without speculation."""

import doctest
from typing import Any

import pytest
from cases import PROMPT_LOOKUP, generate
from conftest import RUNNER

if RUNNER == "v1":
    import torch


@pytest.mark.skipif(RUNNER == "v2", reason="V2 has no generators")
def test_seeded_requests_with_chunked_prompts(engine: Any) -> None:
    """Beside others, they say what they say when the prompt comes in one piece. Kills: torch's generators in V1's
    batch, which vLLM winds back in the middle of a prompt: on a CPU it dies of that.
    """
    prompts = [[10 + (7 * i + row) % 90 for i in range(300)] for row in range(3)]
    outputs = []
    for num_tokens in (2048, 128):
        llm = engine(PROMPT_LOOKUP, max_num_batched_tokens=num_tokens, enable_chunked_prefill=True)
        outputs.append(generate(llm, prompts, [3], temperature=1.0, seed=11))
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 3


@pytest.mark.skipif(RUNNER == "v2", reason="mends V1's CPU kernel")
def test_expanded_parameters() -> None:
    from vllm_specplugins.engine.v1 import runner
    from vllm_specplugins.engine.v1.vllm_sampler import expand_batch_to_tokens

    assert doctest.testmod(runner).failed == 0
    x, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expand_batch_to_tokens(x, ends, 5, 0, 1).tolist() == [0.5, 0.5, 2.0, 2.0, 2.0]
    k = torch.tensor([7, 0, 9], dtype=torch.int32)
    expanded = expand_batch_to_tokens(k, torch.tensor([1, 3, 4], dtype=torch.int32), 4)
    assert expanded.tolist() == [7, 0, 0, 9] and expanded.dtype == torch.int32
