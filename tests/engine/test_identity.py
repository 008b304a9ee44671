"""Token-identical to no speculation at temperature 0, under everything that a scheduler does to requests."""

from itertools import pairwise
from typing import Any

import pytest
from cases import IS_SHORT, LONG, PROMPT_LOOKUP, SUFFIX_LOOKUP, early_exit, generate
from conftest import INTERPRETED, NUM_LAYERS

METHODS = [PROMPT_LOOKUP, *([] if LONG == PROMPT_LOOKUP else [LONG]), SUFFIX_LOOKUP, early_exit(NUM_LAYERS // 2)]
PROMPTS, NUM_TOKENS = slice(None), 16 if INTERPRETED else 24
SIZES = [1, 8, 2, 7, 3, 6, 4, 5]


@pytest.mark.slow
def test_batches(engine: Any, prompts: Any, expected: Any) -> None:
    """50 prompts (16 on V2) of mixed lengths in batches of 1 to 8. Kills: a draft put into another request's row."""
    llm, some = engine(PROMPT_LOOKUP), slice(16 if INTERPRETED else None)
    assert generate(llm, prompts[some], SIZES) == expected[some]
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["accepted_tokens"] > 2 * len(prompts[some]), "the drafts must matter to the outcome"
    assert stats["faults"] == {}


END_OF_CONTEXT = {"max_model_len": 64, "max_num_batched_tokens": 64}
REPETITIVE = [5, 6, 7, 8] * 15
NEAR_THE_END = [REPETITIVE[:40], REPETITIVE[:57], REPETITIVE[:60], list(range(20, 40))]


@pytest.fixture(
    scope="module", params=METHODS, ids=lambda config: f"{config['method']} {config.get('num_speculative_tokens', 31)}"
)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    method: dict[str, Any] = request.param
    return method


@pytest.fixture(scope="module")
def plain_to_the_end(engine: Any) -> list[list[int]]:
    return generate(engine(**END_OF_CONTEXT), NEAR_THE_END, [4], max_tokens=60)


def test_end_of_context(engine: Any, plain_to_the_end: Any, config: dict[str, Any]) -> None:
    """Requests that reach max_model_len in the middle of a draft, beside one that does not. Kills: a room for drafts
    that is negative there, which the fault barrier would count.
    """
    llm = engine(config, **END_OF_CONTEXT)
    assert generate(llm, NEAR_THE_END, [4], max_tokens=60) == plain_to_the_end
    assert [len(tokens) for tokens in plain_to_the_end] == [24, 7, 4, 44]
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


@pytest.mark.skipif(not IS_SHORT, reason="test_end_of_context does more")
def test_long_drafts(engine: Any, plain_to_the_end: Any) -> None:
    """A few steps of up to 31 draft tokens, to the end of the context."""
    llm = engine({"method": "prompt_lookup", "gate": "off"}, **END_OF_CONTEXT)
    assert generate(llm, NEAR_THE_END[:2], [2], max_tokens=60) == plain_to_the_end[:2]
    llm.collective_rpc("specplugins_stats")  # what is counted on a device is read when the next report is due
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["drafted_tokens"] > 31 and stats["accepted_tokens"] > 0 and stats["faults"] == {}


@pytest.fixture(scope="module")
def edits(prompts: Any) -> list[list[int]]:
    return [prompt for prompt in prompts if len(prompt) > 100][: 4 if INTERPRETED else 6]


@pytest.fixture(scope="module")
def plain_stops(engine: Any, edits: Any) -> list[tuple[list[int], str]]:
    return stopped(engine(), edits)


def stopped(llm: Any, edits: list[list[int]]) -> list[tuple[list[int], str]]:
    """Returns outputs and finish reasons with min_tokens and a stop token each, which the model emits later."""
    from vllm import SamplingParams

    stop_at = [tokens[25] for tokens in generate(llm, edits, [6], max_tokens=26)]
    params = [
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop], min_tokens=i, detokenize=False)
        for i, stop in enumerate(stop_at)
    ]
    results = llm.generate([{"prompt_token_ids": edit} for edit in edits], params, use_tqdm=False)
    return [(list(result.outputs[0].token_ids), result.outputs[0].finish_reason) for result in results]


def test_stops(engine: Any, edits: Any, plain_stops: Any, config: dict[str, Any]) -> None:
    """Stop tokens, and min_tokens. Kills: a drafted stop token accepted where min_tokens forbids it."""
    assert stopped(engine(config), edits) == plain_stops


def steps_of(llm: Any, request_id: str, prompt: list[int], num_steps: int | None = None, **sampling: Any) -> list[Any]:
    """(token ids, text, finish reason) of a request after each engine step; aborted if it needs more than num_steps."""
    from vllm import SamplingParams

    core = llm.llm_engine
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, **sampling}
    core.add_request(request_id, {"prompt_token_ids": prompt}, SamplingParams(**params))
    seen: list[Any] = []
    while core.has_unfinished_requests() and len(seen) != num_steps:
        for result in core.step():
            [output] = result.outputs
            seen.append((list(output.token_ids), output.text, output.finish_reason))
    if core.has_unfinished_requests():
        core.abort_request([request_id])
        core.step()
    return seen


def test_stop_inside_a_draft(engine: Any, edits: Any, config: dict[str, Any]) -> None:
    """A stop token, and a stop string, with accepted tokens of the same draft behind them, which are not given out. The
    check is vLLM's own. Kills: a method that fails (a fault is counted) over a request that ends there.
    """
    llm = engine(config)
    tokens_found = strings_found = 0
    for edit in edits:
        whole = steps_of(llm, "a", edit)
        token_ids, text, _ = whole[-1]
        for (old_ids, old_text, _), (new_ids, new_text, _) in pairwise(whole):
            if len(new_ids) - len(old_ids) < 3:
                continue
            stop = token_ids[len(old_ids)]  # the draft's first token; the second one was accepted, too
            if not tokens_found and stop not in old_ids:
                tokens_found += 1
                assert steps_of(llm, "a", edit, stop_token_ids=[stop])[-1][::2] == ([*old_ids, stop], "stop")
            string = text[len(old_text) + 1 : len(old_text) + 3]
            if not strings_found and len(old_text) + 4 < len(new_text) and text.find(string) == len(old_text) + 1:
                strings_found += 1
                assert steps_of(llm, "a", edit, stop=[string])[-1][1:] == (text[: len(old_text) + 1], "stop")
    assert tokens_found and strings_found
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}


def test_abort_and_same_id(engine: Any, prompts: Any, config: dict[str, Any]) -> None:
    """A request aborted in the middle, and a new one with its id. Kills: a history of the old one that remains."""
    llm = engine(config)
    first, second = prompts[7], prompts[12]
    alone = steps_of(llm, "same-id", second)[-1]
    assert steps_of(llm, "same-id", first, 5)[-1][2] is None
    assert steps_of(llm, "same-id", second)[-1] == alone
    assert len(alone[0]) == 40
    assert llm.collective_rpc("specplugins_stats")[0]["faults"] == {}
