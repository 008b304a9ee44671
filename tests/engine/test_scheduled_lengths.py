"""How many tokens a step drafts, chosen in the scheduler by what steps took and brought."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts
from conftest import DEMO_MODEL, RUNNER, TAPES

if RUNNER != "v2":
    pytest.skip("V1 has a gate", allow_module_level=True)

from recorded import runner

from vllm_specplugins.engine.adaptive import conditions
from vllm_specplugins.engine.v2 import scheduler as module
from vllm_specplugins.engine.v2.scheduler import DraftLengths, PlannedScheduler
from vllm_specplugins.gate.step_times import StepTimes

K, NUM_TOKENS = 5, 24


class Played:
    """An engine, two steps deep, whose clock is ours: drafts are planned a step before they are made.

    Args:
        accept_prob: of a draft token to be right, if those before it are.
        token_ms: of each token that is verified.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accept_prob: float, token_ms: float, num_reqs: int = 8):
        monkeypatch.setattr(module, "StepTimes", StepTimes)
        self.now, self.accept_prob, self.token_ms, self.rng = 0.0, accept_prob, token_ms, np.random.default_rng(0)
        self.lengths, self.ids = DraftLengths(K, lambda: self.now / 1000), {f"r{i}": 1 for i in range(num_reqs)}

    def steps(self, num_steps: int) -> list[int]:
        """How many tokens each step drafted."""
        drafted = [K]
        for _ in range(num_steps):
            verified, length = drafted[-1], self.lengths[len(self.ids)]
            self.now += 10 + self.token_ms * len(self.ids) * verified
            right = self.rng.random((len(self.ids), verified)) < self.accept_prob
            emitted = 1 + right.cumprod(axis=1).sum(axis=1)
            drafts = {name: [-1] * verified for name in self.ids} if verified else {}
            scheduled = SimpleNamespace(
                num_scheduled_tokens=self.ids, scheduled_spec_decode_tokens=drafts, specplugins_num_draft=verified,
                total_num_scheduled_tokens=len(self.ids) * (1 + verified), num_spec_tokens_to_schedule=length,
            )  # fmt: skip
            self.lengths.tell(scheduled, SimpleNamespace(sampled_token_ids=[[0] * n for n in emitted]))
            drafted.append(length)
        return drafted[1:]


@pytest.mark.parametrize(("accept_prob", "token_ms", "best"), [(0.9, 0.01, K), (0.05, 0.3, 0), (0.9, 5.0, 0)])
def test_what_pays(monkeypatch: pytest.MonkeyPatch, accept_prob: float, token_ms: float, best: int) -> None:
    """But for trials. Fails if a step's time is laid to the drafts that it makes and not to those that it verifies, or
    if nothing is tried any more."""
    drafted = Played(monkeypatch, accept_prob, token_ms).steps(1000)[200:]
    assert np.mean([length == best for length in drafted]) > 0.9 and len(set(drafted)) > 1
    assert drafted[::2] == drafted[1::2] or drafted[1:-1:2] == drafted[2::2], "a length holds for two steps"


def test_what_is_not_told() -> None:
    """Fails if a step that takes a prompt in counts, one of another batch, or one that drafts more than it verifies."""
    lengths, seen = DraftLengths(K, lambda: 1.0), []
    lengths._times.add = lambda *step: seen.append(step)  # type: ignore[method-assign]

    def step(ids: str, num_tokens: int, length: int = 2) -> None:
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys(ids, 3), scheduled_spec_decode_tokens={name: [-1, -1] for name in ids},
            total_num_scheduled_tokens=num_tokens, num_spec_tokens_to_schedule=length, specplugins_num_draft=2,
        )  # fmt: skip
        lengths.tell(scheduled, SimpleNamespace(sampled_token_ids=[[1]] * len(ids)))

    for ids, num_tokens, length in (("ab", 6, 2), ("a", 3, 2), ("ab", 6, 2), ("ab", 9, 2), ("ab", 6, 4)):
        step(ids, num_tokens, length)
    assert seen == []
    step("ab", 6)
    assert seen == [(2, 2, 0.0, [1, 1])]


@pytest.mark.skipif(not TAPES, reason="needs graphs")
def test_lengths_that_change(engine: Any) -> None:
    """Steps without drafts among others, which emit what no speculation does. Fails if a draft that was
    not made is verified, if what is left in a buffer is, or if a request's tokens are not counted."""
    prompts = mixed_prompts(str(DEMO_MODEL), 4)
    expected = generate(engine(enforce_eager=True), prompts, [4], max_tokens=NUM_TOKENS)
    llm = engine(PROMPT_LOOKUP, async_scheduling=True)
    scheduler, told = llm.llm_engine.engine_core.engine_core.scheduler, []
    assert isinstance(scheduler.dynamic_sd_lookup, DraftLengths)

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            told.append((0, 0, 0, 4, 4, 2, 1)[len(told) % 7])
            return told[-1]

    before = llm.collective_rpc("specplugins_stats")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "dynamic_sd_lookup", Turns())
        assert generate(llm, prompts, [4], max_tokens=NUM_TOKENS) == expected
    after = llm.collective_rpc("specplugins_stats")[0]
    assert after["faults"] == {} and after["drafted_tokens"] > before["drafted_tokens"]
    emitted = sum(after[name] - before[name] for name in ("request_steps", "accepted_tokens"))
    assert emitted >= 4 * (NUM_TOKENS - 1)
    assert runner(llm).speculator.tally._drafted in (0, 1, 2, 4)


@pytest.mark.skipif(not TAPES, reason="needs graphs")
def test_graphs_where_nothing_trims(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step that drafts nothing has no graph of its own, or one that drafts K has none any more."""
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(conditions, "_missing", lambda vllm_config: "this is a test")
    engine.stop()
    llm = engine(PROMPT_LOOKUP, async_scheduling=True)
    assert runner(llm).adaptive_verification is None
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup, DraftLengths)
    width = PROMPT_LOOKUP["num_speculative_tokens"]
    for length in (0, width):
        mode = runner(llm).cudagraph_manager.dispatch(2, 2 * (1 + length), 1 + length, 0).cg_mode
        assert mode == CUDAGraphMode.FULL, length
    engine.stop()


def planned_with_a_grammar(*accepted: int) -> list[int]:
    """How many tokens are planned for a request with a grammar (31 by default) after steps that accepted so many."""
    scheduler = PlannedScheduler.__new__(PlannedScheduler)
    scheduler._num_tokens = {}
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda request, tokens: tokens)
    request = SimpleNamespace(
        request_id="a", num_tokens=9, use_structured_output=True, is_prefill_chunk=False, is_finished=lambda: False
    )
    scheduler.requests, planned = {"a": request}, []
    for num in accepted:
        request.num_tokens += 1 + num
        request.spec_token_ids = [-1] * 31
        drafts = SimpleNamespace(req_ids=["gone", "a"], draft_token_ids=[[1], [2] * 31])
        scheduler.update_draft_token_ids_in_output(drafts, SimpleNamespace(scheduled_spec_decode_tokens={}))
        planned.append(len(request.spec_token_ids))
    return planned


def test_planned_with_a_grammar() -> None:
    """A row of a grammar's mask is filled for each planned token. Fails if all of K is planned where nothing is found,
    if a request that copies is held at five, or if it is not let go again."""
    assert planned_with_a_grammar(0, 0, 4, 5, 31, 31, 2, 0) == [5, 5, 5, 31, 31, 31, 5, 5]
