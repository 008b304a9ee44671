"""Temperatures other than 0: what is sampled has the distribution that it has without speculation."""

import doctest
from collections import Counter
from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, generate
from conftest import INTERPRETED, RUNNER, spec_metrics
from scipy.stats import chi2_contingency

if RUNNER == "v1":
    import torch

WITHOUT_TAPES = "64 samples a step take minutes in Triton's interpreter"
Pairs = Counter[tuple[int, ...]]


def sampled(llm: Any, num_samples: int, reference: list[int]) -> Pairs:
    """How often each pair of first two tokens comes up; the second is drafted where `reference` holds the first."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.8,
        top_p=1.0 if INTERPRETED else 0.95,  # vLLM's top-p kernel does not run through Triton's interpreter
        n=num_samples,
        max_tokens=2,
        detokenize=False,
        extra_args={"specplugins": {"reference": reference}},
    )
    [result] = llm.generate([{"prompt_token_ids": [40, 41, 42, 43, 44] * 8}], params, use_tqdm=False)
    return Counter(tuple(output.token_ids) for output in result.outputs)


@pytest.mark.slow
def test_distribution(engine: Any) -> None:
    """Chi-squared on pairs of tokens. Kills: drafted positions verified at another temperature or top-p."""
    num_samples = 1200 if RUNNER == "v1" else 240
    arguments = {"max_num_seqs": 64, "enable_prefix_caching": True}
    plain = sampled(engine(**arguments), num_samples, [])
    reference = [token for pair, _ in reversed(plain.most_common(200)) for token in pair]
    llm = engine({**PROMPT_LOOKUP, "min_ngram": 1}, **arguments)
    drafted = sampled(llm, num_samples, reference)
    metrics = spec_metrics(llm)
    assert metrics["draft_tokens"] > num_samples / 3 and metrics["accepted_tokens"] > num_samples / 100
    cells = [pair for pair, count in (plain + drafted).items() if count >= 10]
    table = np.array([[counts[cell] for cell in cells] for counts in (plain, drafted)])
    rest = num_samples - table.sum(axis=1, keepdims=True)
    assert chi2_contingency(np.hstack([table, rest])).pvalue > 1e-4


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
