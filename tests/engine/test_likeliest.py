"""What the target found likeliest, as a proposer is told in real engines: it is that, and no output changes."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import STRESS, generate, mixed_prompts
from conftest import DEMO_MODEL
from recycling import LIKELIEST

pytestmark = pytest.mark.slow
BEFORE_AN_EXIT = {
    "method": "cascade",
    "num_speculative_tokens": 4,
    "gate": "off",
    "stages": [{**LIKELIEST, "num_speculative_tokens": 2}, {"method": "early_exit", "exit_layer": 1}],
}
SIZES = [1, 4, 3]
Pairs = set[tuple[int, int]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    return generate(engine(), prompts, SIZES)


@pytest.fixture(scope="module", params=[LIKELIEST, BEFORE_AN_EXIT], ids=["alone", "before an exit"])
def llm(request: Any, engine: Any, expected: Any) -> Any:
    return engine(request.param, **STRESS)


@pytest.fixture
def told(llm: Any) -> Iterator[Pairs]:
    """The pairs that the proposer is told from now on."""
    proposer = llm.llm_engine.model_executor.driver_worker.worker._barrier.proposer
    own = proposer.named_stages()[0][1] if hasattr(proposer, "named_stages") else proposer
    own.told.clear()
    yield own.told
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_greedy(llm: Any, told: Pairs, prompts: Any, expected: Any) -> None:
    """Outputs are those without speculation, and each token that was said was told after the one before it. Kills: a
    row of another request or place; a request's first row, whose token is no draft, with another one; rows in the
    middle of a prompt.
    """
    longer = generate(llm, prompts, SIZES, max_tokens=len(expected[0]) + 10)  # a request's last steps ask for no drafts
    assert [tokens[: len(expected[0])] for tokens in longer] == expected
    texts = [[prompt[-1], *output] for prompt, output in zip(prompts, expected, strict=True)]
    assert {pair for text in texts for pair in pairwise(text)} <= told
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 10


def test_sampled(llm: Any, told: Pairs, prompts: Any) -> None:
    """The likeliest token is told, whatever was drawn. Kills: the sampled token in its place."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=8 + 10, ignore_eos=True, detokenize=False, logprobs=1)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    num_others = 0
    for prompt, result in zip(prompts, llm.generate(asked, params, use_tqdm=False), strict=True):
        [output] = result.outputs
        token_ids = output.token_ids[:8]  # a request's last steps ask for no drafts
        before = [prompt[-1], *token_ids[:-1]]
        likeliest = [min(places, key=lambda token: places[token].rank) for places in output.logprobs[:8]]
        assert set(zip(before, likeliest, strict=True)) <= told
        num_others += int((np.array(likeliest) != token_ids).sum())
    assert num_others > 10
