"""True draft lengths are honoured: what was not found is not verified; and references are looked up."""

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from async_front_end import answers_of, async_llm
from cases import PROMPT_LOOKUP, answered_alone, ask_turns, check_session, early_exit, generate, progress
from conftest import RUNNER, spec_metrics


def drafted(llm: Any, prompts: list[list[int]], **sampling: Any) -> dict[str, float]:
    """What vLLM's counters say was drafted for these prompts."""
    before = spec_metrics(llm)
    generate(llm, prompts, [len(prompts)], **sampling)
    return {name: value - before[name] for name, value in spec_metrics(llm).items()}


# Scheduled behind the drafts, whose lengths are then known from the first step on.
SYNCHRONOUS = {"async_scheduling": False}
OFF = {"extra_args": {"specplugins": {"enabled": False}}}


def allowed_only(*tokens: int) -> dict[str, Any]:
    """Sampling parameters that make a model repeat these tokens, and nothing else, in some order."""
    return {"allowed_token_ids": list(tokens)}


def test_nothing_found_costs_one_token(engine: Any) -> None:
    """Kills: K verified tokens for a request for which nothing was found."""
    llm = engine(PROMPT_LOOKUP, **SYNCHRONOUS)
    counts = drafted(llm, [list(range(10, 60))], max_tokens=3, **allowed_only(5))  # no token twice
    assert counts["draft_tokens"] == 0


def test_no_draft_past_max_tokens(engine: Any) -> None:
    """A text that repeats itself. Fails if a draft goes past what the request may still emit, by one token or more."""
    llm = engine(PROMPT_LOOKUP, **SYNCHRONOUS)
    for max_tokens, most in ((1, 0), (2, 0), (3, 1), (4, 2 + 1)):
        counts = drafted(llm, [[5, 6, 7, 8] * 10], max_tokens=max_tokens, **allowed_only(5))
        assert counts["draft_tokens"] == most


def test_found_is_verified(engine: Any) -> None:
    llm = engine(PROMPT_LOOKUP, **SYNCHRONOUS)
    counts = drafted(llm, [[5, 6, 7, 8] * 10], max_tokens=20, **allowed_only(5))
    assert counts["draft_tokens"] > 0
    assert counts["accepted_tokens"] >= 12, "5 5 5 5 ... is found from the third token on"


@pytest.mark.parametrize("asynchronous", [False, *([True] if RUNNER == "v2" else [])])
def test_session(engine: Any, asynchronous: bool) -> None:
    """Turns that end within a draft. Fails if the next one goes on after tokens that were dropped."""
    check_session(engine(PROMPT_LOOKUP, async_scheduling=asynchronous), [5, 6, 7, 8] * 10, stop_token_ids=[7])


def test_sessions_of_the_asynchronous_front_end(engine: Any) -> None:
    """Side by side, with turns that wait for answers and turns that do not, each with options and an end of its own.
    Fails if a turn is answered otherwise than a prompt of the same tokens, has another's options or end, or if nothing
    is drafted."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = engine(PROMPT_LOOKUP, async_scheduling=RUNNER == "v2")
    turns = [[[5, 6, 7, 8] * 10, [5, 6, 7, 8, 5, 6, 7], [8]], [[9, 10, 11] * 9, [9], [10, 11, 9]]]
    own = [{"max_tokens": 8}, {"max_tokens": 5, "extra_args": {"specplugins": '{"max_draft": 3}'}}, {"max_tokens": 6}]
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}

    def params(stop: int) -> Callable[[int], Any]:
        return lambda number: SamplingParams(**common, stop_token_ids=[stop], **own[number])

    async def served() -> Any:
        async with async_llm(llm) as made:
            sessions = [(each, waits) for each in turns for waits in (True, False)]
            asked = (
                answers_of(made, str(number), each, waits, params(each[0][2]))
                for number, (each, waits) in enumerate(sessions)
            )
            return zip(sessions, await asyncio.gather(*asked), strict=True)

    before = progress(llm)[1]
    for (each, _), tokens in asyncio.run(served()):
        answers = list[list[int]]()
        for number, options in enumerate(own):
            own_end = {"stop_token_ids": [each[0][2]], **options, **OFF}
            answers.append(answered_alone(llm, each[: number + 1], [*answers, [0]], **own_end)[-1])
        assert tokens == [*chain.from_iterable(answers)]
    assert progress(llm)[1] > before


def test_options_of_a_turn(engine: Any) -> None:
    """Fails if a session's turn has the options of the one before, or its end."""
    llm, turns = engine(PROMPT_LOOKUP, **SYNCHRONOUS), [[5, 6, 7, 8] * 10, [5, 6]]
    short, without = {"max_tokens": 2}, {"max_tokens": 9, **OFF}
    for each, drafts in (([short, without], False), ([without, {"max_tokens": 9}], True)):
        before = progress(llm)[1]
        ask_turns(llm, turns, each)
        assert bool(progress(llm)[1] > before) is drafts


@pytest.mark.usefixtures("whole_drafts")
def test_ragged_batch(engine: Any) -> None:
    """In one batch: a request that repeats itself, and one that cannot."""
    llm = engine(PROMPT_LOOKUP, **SYNCHRONOUS)
    repeating = drafted(llm, [[5, 6] * 10], max_tokens=6, **allowed_only(5))
    both = drafted(llm, [[5, 6] * 10, list(range(10, 60))], max_tokens=6, **allowed_only(5))
    # The second request's output 5 5 5 ... is found once it has repeated itself, never before.
    assert repeating["draft_tokens"] < both["draft_tokens"] < 2 * repeating["draft_tokens"] + 1


@pytest.mark.skipif(RUNNER == "v1", reason="V1 schedules synchronously for host proposers")
def test_asynchronous_plan_follows_the_record(engine: Any) -> None:
    """Scheduled before the drafts exist: the first step plans K, the following ones what was last found."""
    llm = engine(PROMPT_LOOKUP, async_scheduling=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == "PlannedScheduler"
    prompt = list(range(10, 60))
    before = llm.collective_rpc("specplugins_stats")[0]
    counts = drafted(llm, [prompt], max_tokens=3, logit_bias=None, **allowed_only(100, 101, 102))
    after = llm.collective_rpc("specplugins_stats")[0]
    assert counts["draft_tokens"] <= 2 * PROMPT_LOOKUP["num_speculative_tokens"]
    assert after["request_steps"] > before["request_steps"]
    repeating = drafted(llm, [[5, 6, 7, 8] * 10], max_tokens=20, **allowed_only(5))
    assert repeating["accepted_tokens"] >= 8


@pytest.mark.skipif(RUNNER == "v2", reason="of V1: see test_dummy_runs for V2")
def test_max_model_len_sinks(engine: Any) -> None:
    """vLLM fits it to the memory after the proposer was made. Kills: an end of drafting that is vLLM's from then on:
    near it V1 drafts zeros for the whole batch."""
    llm = engine(PROMPT_LOOKUP)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    long, num_drafts = runner.max_model_len, PROMPT_LOOKUP["num_speculative_tokens"]
    for length in (long - 8, long):
        llm.collective_rpc("update_max_model_len", args=(length,))
        assert runner.max_model_len == length
        assert runner.effective_drafter_max_model_len == length + num_drafts + 1


def test_reference(engine: Any) -> None:
    """`extra_args["specplugins"]["reference"]`: the output itself, given as a prediction, is drafted from."""
    llm = engine(PROMPT_LOOKUP)
    prompt = list(range(10, 60))
    [plain] = generate(llm, [prompt], [1])
    before = spec_metrics(llm)
    [predicted] = generate(llm, [prompt], [1], extra_args={"specplugins": {"reference": [*prompt[-3:], *plain]}})
    accepted = spec_metrics(llm)["accepted_tokens"] - before["accepted_tokens"]
    assert predicted == plain
    assert accepted >= 0.75 * len(plain) - 4, "nearly all tokens are accepted drafts"


@pytest.mark.parametrize(
    ("options", "most"),
    [({"enabled": False}, 0), ({"max_draft": 0}, 0), ({"max_draft": 2}, 2), ({"max_context": 9}, 0), ({}, 4)],
)
@pytest.mark.parametrize("method", ["prompt_lookup", *(["early_exit"] if RUNNER == "v1" else [])])
def test_limits(engine: Any, method: str, options: dict[str, Any], most: int) -> None:
    """What a request allows is what is verified for it, beside one that allows everything."""
    llm = engine(PROMPT_LOOKUP if method == "prompt_lookup" else early_exit(1))
    prompt = [7, 8, 9, 10] * 6
    plain = generate(llm, [prompt], [1])
    before = spec_metrics(llm)
    assert generate(llm, [prompt], [1], extra_args={"specplugins": options}) == plain
    after = spec_metrics(llm)
    drafts, tokens = (after[name] - before[name] for name in ("drafts", "draft_tokens"))
    assert (drafts > 0) == (most > 0)
    assert tokens <= most * drafts and (most == 0 or tokens > (most - 1) * drafts - 4)
