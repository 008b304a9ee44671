"""Limits of the scheduler that are smaller than a draft, and calls that change what a request has computed."""

from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, answered_alone, ask_turns, generate, progress
from conftest import INTERPRETED, RUNNER
from played_scheduler import BLOCK_SIZE, Played
from test_plugin import engine_config

from vllm_specplugins.config import ConfigError
from vllm_specplugins.engine.frontend import scheduling

BUDGET, THRESHOLD = {"max_num_batched_tokens": 24, "max_num_seqs": 4}, {"long_prefill_token_threshold": 16}


@pytest.mark.parametrize("length", [None, 31, 64])
@pytest.mark.parametrize(
    ("limits", "most"),
    [(BUDGET, 23), (THRESHOLD, 15), (BUDGET | THRESHOLD, 15), ({"max_num_scheduled_tokens": 20}, 19), ({}, 64)],
)
def test_length_fits(limits: dict[str, Any], most: int, length: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if K + 1 tokens are more than a step may schedule where vLLM pads a prompt to them, if K is shorter than
    need be, if a user gets another K than he asked for, or if K is shortened where a table of lengths has nothing
    padded."""
    told: list[str] = []
    monkeypatch.setattr(scheduling.logger, "info", lambda words, *_: told.append(words))
    config = {"method": "prompt_lookup"} | ({"num_speculative_tokens": length} if length else {})
    for gate in ("off", *(["auto"] if RUNNER == "v2" else [])):
        told.clear()
        wanted = length or 31
        fits = min(wanted, most if gate == "off" else 64)
        if length and fits < length:
            with pytest.raises(
                ConfigError, match=rf"must allow {length + 1} tokens with num_speculative_tokens {length}, not"
            ):
                engine_config(config | {"gate": gate}, **limits)
            continue
        found = engine_config(config | {"gate": gate}, **limits)
        assert found.num_speculative_tokens == found.speculative_config.plugin_config.length == fits
        assert sum("num_speculative_tokens defaults to" in sentence for sentence in told) == (fits != wanted)


def play(config: dict[str, Any], num_blocks: int | None, accept_prob: float, **arguments: Any) -> Played:
    """Thirty requests of all lengths, of which some end at a stop id, and some are aborted."""
    played, rng = Played(config, num_blocks, accept_prob, **arguments), np.random.default_rng(0)
    room = played.max_model_len
    for index in range(30):
        length = int(rng.integers(1, room))
        stops = [3] if index % 3 == 0 else None
        played.add(str(index), (np.arange(length) % (2 + index % 2)).tolist(), int(rng.integers(1, room)), stops)
        for _ in range(index % 4):
            played.step()
        if index % 10 == 9:
            played.abort(str(index - 1))
    played.run()
    return played


SCHEDULES = [False, True] if RUNNER == "v2" else [False]
MOST = {"max_num_seqs": 1, "max_model_len": 16}, {"max_num_seqs": 3, "max_model_len": 40}, {"max_model_len": 100}


@pytest.mark.usefixtures("whole_drafts")
@pytest.mark.parametrize("asynchronous", SCHEDULES)
@pytest.mark.parametrize("length", [31, 64])
@pytest.mark.parametrize("method", [{"method": "prompt_lookup"}, {"method": "early_exit", "exit_layer": 1}], ids=str)
def test_requests_end_within_all_limits(method: dict[str, Any], length: int, asynchronous: bool) -> None:
    """A context, a batch or a KV cache that is smaller than a draft. Fails if a request is never scheduled, never ends
    or ends early; if the scheduler asserts; or if tokens a step are not those that requests emit."""
    longest = preempted = 0
    for limits in MOST:
        least = -(-limits["max_model_len"] // BLOCK_SIZE) + 1  # for one request, and vLLM's null block
        for num_blocks, accept_prob in ((least, 1.0), (least + 5, 0.7), (200, 0.9)):
            room = limits["max_model_len"] * limits.get("max_num_seqs", 8)  # of a step; V1 refuses a longer K
            config = {**method, "num_speculative_tokens": min(length, room - 1) if RUNNER == "v1" else length}
            played = play(config, num_blocks, accept_prob, **limits, async_scheduling=asynchronous)
            assert played.is_ahead == asynchronous
            played.check()
            longest, preempted = max(longest, played.longest), preempted + played.preempted
    assert longest == min(length, 100 - 2) and preempted > 0


@pytest.mark.skipif(RUNNER == "v1", reason="V1 has none")
def test_tokens_a_step_of_a_pipeline() -> None:
    """Three steps under way. Fails if those of a request that is over, or was preempted, are counted."""
    played = play(PROMPT_LOOKUP, 12, 0.8, max_model_len=100, pipeline_parallel_size=2)
    assert played.depth == 3 and played.preempted > 0
    played.check()


@pytest.mark.skipif(RUNNER == "v2", reason="the scheduler is V1's, too")
def test_cached_prompts_are_served(engine: Any) -> None:
    """Prompts that are cached but for a token, alone and beside others. Fails if one is never scheduled, or the engine
    dies of it: vLLM pads it to K + 1 tokens, which no step has room for, or which a long prompt may not have."""
    prompts = [(np.arange(65) * step % 300 + 10).tolist() for step in (1, 3, 7)]
    expected = generate(engine(), prompts, [3], max_tokens=9)
    llm = engine({"method": "prompt_lookup"}, **BUDGET, **THRESHOLD, enable_prefix_caching=True)
    core = llm.llm_engine.engine_core.engine_core
    schedule, idle = core.scheduler.schedule, []

    def counted(*args: Any) -> Any:
        found = schedule(*args)
        idle.append(not found.num_scheduled_tokens)
        assert sum(idle[-20:]) < 20, "nothing is scheduled"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core.scheduler, "schedule", counted)
        for sizes in ([1], [1], [3], [3]):
            assert generate(llm, prompts, sizes, max_tokens=9) == expected


MOST_TOKENS = 10 if INTERPRETED else 40  # of a request


def test_calls_in_any_order(engine: Any) -> None:
    """Sessions beside requests that are added, aborted, preempted by resets of the prefix cache or for memory, and
    sleep of level 0; scheduled asynchronously on V2. Fails if what a request has computed, or what it had drafted,
    outlives a call that takes it back."""
    from vllm import SamplingParams

    limits = {"num_gpu_blocks_override": 14, "enable_prefix_caching": True, "max_model_len": 320}
    llm = engine(PROMPT_LOOKUP, **limits, async_scheduling=RUNNER == "v2")
    core, process = llm.llm_engine.engine_core.engine_core, llm.llm_engine.input_processor.process_inputs
    rng, step_fn = np.random.default_rng(0), core.step_fn
    answers: dict[str, list[int]] = {}
    asked: dict[str, tuple[list[int], int]] = {}
    running: set[str] = set()

    def add() -> None:
        name, prompt = f"other {len(asked)}", (np.arange(30 + rng.integers(90)) % rng.integers(3, 6) + 5).tolist()
        asked[name], answers[name] = (prompt, int(rng.integers(1, MOST_TOKENS))), []
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=asked[name][1])
        request = process(name, {"type": "token", "prompt_token_ids": [*prompt]}, params, ("generate",))
        core.add_request(*core.preprocess_add_request(request))
        running.add(name)

    def step() -> Any:
        match rng.integers(12):
            case 0 | 1 | 2 if len(running) < 5:
                add()
            case 3 if running:
                name = sorted(running)[0]
                core.abort_requests([name])
                running.discard(name)
                del asked[name]
            case 4 if not core.scheduler.num_waiting_for_streaming_input:  # vLLM refuses it then
                core.reset_prefix_cache(reset_running_requests=True)
            case 5:
                core.sleep(0, "keep")
                core.wake_up(["scheduling"])
        outputs, is_run = step_fn()
        for output in (one for own in (outputs or {}).values() for one in own.outputs):
            if output.request_id in answers:
                answers[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    running.discard(output.request_id)
        return outputs, is_run

    sessions = []
    before = progress(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "step_fn", step)
        for num in (7, 20, 33) if not INTERPRETED else (6, 9):
            turns = [(np.arange(size) % 4 + 5).tolist() for size in (40, *rng.integers(1, 9, 3))]
            stops = [int(rng.integers(5, 9))]
            sessions.append((turns, num, stops, ask_turns(llm, turns, max_tokens=num, stop_token_ids=stops)))
    while running:
        core.post_step(step()[1])
    assert (progress(llm) - before)[1] > 0, llm.collective_rpc("specplugins_stats")[0]
    for name, (prompt, num) in asked.items():
        assert generate(llm, [prompt], [1], max_tokens=num, extra_args={"specplugins": {"enabled": False}}) == [
            answers[name]
        ]
    for turns, num, stops, found in sessions:
        assert answered_alone(llm, turns, found, max_tokens=num, stop_token_ids=stops) == found
