"""Token recycling in real engines: what it is told is what the target found, and no output changes."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cases import STRESS, TOKEN_RECYCLING, generate, mixed_prompts
from conftest import DEMO_MODEL

pytestmark = pytest.mark.slow
BEFORE_AN_EXIT = {
    "method": "cascade",
    "num_speculative_tokens": 4,
    "gate": "off",
    "stages": [
        {"method": "token_recycling", "num_speculative_tokens": 2},
        {"method": "early_exit", "exit_layer": 1},
    ],
}
SIZES = [1, 4, 3]
Pairs = set[tuple[int, int]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 8)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: Any) -> list[list[int]]:
    return generate(engine(), prompts, SIZES)


@pytest.fixture(scope="module", params=[TOKEN_RECYCLING, BEFORE_AN_EXIT], ids=["alone", "before an exit"])
def llm(request: Any, engine: Any, expected: Any) -> Any:
    return engine(request.param, **STRESS)


@pytest.fixture
def told(llm: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pairs]:
    """The pairs that the tables take in."""
    tokens, pairs = recycled(llm), set()
    learn = tokens.learn

    def watched(tables: Any, token_ids: Any, next_ids: Any) -> None:
        pairs.update(zip(token_ids.tolist(), next_ids.tolist(), strict=True))
        learn(tables, token_ids, next_ids)

    monkeypatch.setattr(tokens, "learn", watched)
    yield pairs
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def recycled(llm: Any) -> Any:
    proposer = llm.llm_engine.model_executor.driver_worker.worker._barrier.proposer
    return getattr(proposer, "_stages", [proposer])[0]._tokens


def test_greedy(llm: Any, told: Pairs, prompts: Any, expected: Any) -> None:
    """Outputs are those without speculation, and each token that was said was told behind the one before it.

    Kills: a row of another request or place; a request's first row, whose token is no draft, with another one; rows in
    the middle of a prompt.
    """
    assert generate(llm, prompts, SIZES) == expected
    texts = [[prompt[-1], *output] for prompt, output in zip(prompts, expected, strict=True)]
    assert {pair for text in texts for pair in pairwise(text)} <= told
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 10


def test_sampled(llm: Any, told: Pairs, prompts: Any) -> None:
    """The likeliest token is told, whatever was drawn. Kills: the sampled token in its place."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    num_others = 0
    for prompt, result in zip(prompts, llm.generate(asked, params, use_tqdm=False), strict=True):
        [output] = result.outputs
        before = [prompt[-1], *output.token_ids[:-1]]
        likeliest = [min(places, key=lambda token: places[token].rank) for places in output.logprobs]
        assert set(zip(before, likeliest, strict=True)) <= told
        num_others += int((np.array(likeliest) != output.token_ids).sum())
    assert num_others > 10


def test_tenants(llm: Any, told: Pairs, prompts: Any) -> None:
    """Who sends a `cache_salt` has a table of its own.

    Kills: a salt that does not reach the worker; a reset that leaves a table.
    """
    from vllm import SamplingParams

    tokens, found = recycled(llm), []
    llm.collective_rpc("specplugins_store", args=("reset",))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "a"}):
        llm.generate([{"prompt_token_ids": prompts[3], **salt}], params, use_tqdm=False)
        found.append(tokens._times.sum(axis=1, dtype=int).tolist())
    first, second, third = found
    assert first[0] > 0 == first[1] and second[0] == third[0] == first[0] and third[1] > second[1] > 0
    assert tokens.num_tenants == 2
