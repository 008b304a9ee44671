"""Token-identical to no speculation at temperature 0, under everything that a scheduler does to requests."""

from typing import Any

import pytest
from cases import PROMPT_LOOKUP, STRESS, generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER, spec_metrics

SIZES = [1, 8, 2, 7, 3, 6, 4, 5]
ASYNC = [False, True] if RUNNER == "v2" else [False]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return mixed_prompts(str(DEMO_MODEL), 50)


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    return generate(engine(), prompts, SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ASYNC)
def test_batches(engine: Any, prompts: Any, expected: Any, asynchronous: bool) -> None:
    """50 prompts of mixed lengths in batches of 1 to 8. Kills: a draft put into another request's row."""
    llm = engine(PROMPT_LOOKUP, **({"async_scheduling": True} if asynchronous else {}))
    assert generate(llm, prompts, SIZES) == expected
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 100, "the drafts must matter to the outcome"
    assert stats["faults"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ASYNC)
def test_stress(engine: Any, prompts: Any, expected: Any, asynchronous: bool) -> None:
    """Preemption, prefix-cache hits and chunked prefill. Kills: a history that misses a resumed request's output."""
    llm = engine(PROMPT_LOOKUP, **STRESS, **({"async_scheduling": True} if asynchronous else {}))
    assert generate(llm, prompts, [8]) == expected
    assert generate(llm, prompts[:16], [8]) == expected[:16], "the second time from the prefix cache"
    assert spec_metrics(llm)["preemptions"] > 0
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_end_of_context(engine: Any) -> None:
    """Requests that reach max_model_len in the middle of a draft, beside one that does not."""
    repetitive, other = [5, 6, 7, 8] * 15, list(range(20, 40))
    arguments = {"max_model_len": 64, "max_num_batched_tokens": 64}
    prompts = [repetitive[:40], repetitive[:57], repetitive[:60], other]
    plain = generate(engine(**arguments), prompts, [4], max_tokens=60)
    assert generate(engine(PROMPT_LOOKUP, **arguments), prompts, [4], max_tokens=60) == plain
    assert [len(tokens) for tokens in plain] == [24, 7, 4, 44]


def test_stops(engine: Any, prompts: Any) -> None:
    """Stop tokens in the middle of an accepted draft, and min_tokens."""
    from vllm import SamplingParams

    edits = [prompt for prompt in prompts if len(prompt) > 100][:6]

    def run(llm: Any) -> Any:
        stops = generate(llm, edits, [6], max_tokens=40)
        stop_at = [tokens[25] for tokens in stops]
        params = [
            SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], min_tokens=i, detokenize=False)
            for i, stop in enumerate(stop_at)
        ]
        results = llm.generate([{"prompt_token_ids": edit} for edit in edits], params, use_tqdm=False)
        return [(list(result.outputs[0].token_ids), result.outputs[0].finish_reason) for result in results]

    plain = run(engine())
    assert run(engine(PROMPT_LOOKUP)) == plain


def test_abort_and_same_id(engine: Any, prompts: Any) -> None:
    """A request aborted in the middle, and a new one with its id: nothing of the old one's history remains."""
    from vllm import SamplingParams

    llm = engine(PROMPT_LOOKUP)
    core = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)

    def run(token_ids: list[int], steps: int | None) -> list[int]:
        core.add_request("same-id", {"prompt_token_ids": token_ids}, params)
        tokens: list[int] = []
        while core.has_unfinished_requests() and (steps is None or steps > 0):
            for output in core.step():
                tokens = list(output.outputs[0].token_ids)
            steps = None if steps is None else steps - 1
        if core.has_unfinished_requests():
            core.abort_request(["same-id"])
            core.step()
        return tokens

    first, second = prompts[7], prompts[12]
    alone = run(second, None)
    run(first, 5)
    assert run(second, None) == alone
    assert len(alone) == 30
