"""Prompts that are read in chunks with their logprobs, beside requests that are preempted; by hand."""

from typing import Any

import pytest
from cases import PROMPT_LOOKUP, SUFFIX_LOOKUP, cascade
from conftest import spec_metrics
from vllm import SamplingParams

pytestmark = pytest.mark.long
PROMPTS = slice(20, 30)
SCARCE = {
    "max_model_len": 256,
    "num_gpu_blocks_override": 10,
    "max_num_batched_tokens": 48,
    "enable_prefix_caching": True,
}


def answers(llm: Any, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Tokens of each request, and the logprobs of every other prompt, by token."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=30,
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=None if number % 2 else 2,
            logprobs=1 if number % 3 else None,
        )
        for number in range(len(prompts))
    ]
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    logprobs = [
        {
            (row, token): found.logprob
            for row, place in enumerate(result.prompt_logprobs or ())
            for token, found in (place or {}).items()
        }
        for result in results
    ]
    assert all(len(output.outputs[0].logprobs or range(30)) == 30 for output in results)
    return [list(result.outputs[0].token_ids) for result in results], logprobs


@pytest.mark.parametrize("config", [PROMPT_LOOKUP, SUFFIX_LOOKUP, cascade("auto")], ids=lambda config: config["method"])
def test_prompt_logprobs(engine: Any, prompts: Any, config: dict[str, Any]) -> None:
    """Those of no speculation. Kills: rows of a prompt that are read at a draft's places; a request that comes back
    with another one's."""
    tokens, logprobs = answers(engine(None, **SCARCE), prompts)
    llm = engine(config, **SCARCE)
    for _ in range(2):
        found = answers(llm, prompts)
        assert found[0] == tokens
        for ours, theirs in zip(found[1], logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {} and stats["drafted_tokens"] > 0 and spec_metrics(llm)["preemptions"] > 0
