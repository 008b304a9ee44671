"""How many tokens a step drafts, chosen in the scheduler by what steps took and brought."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import PROMPT_LOOKUP, generate, mixed_prompts, progress
from conftest import DEMO_MODEL, RUNNER, TAPES, graphs

if RUNNER != "v2":
    pytest.skip("V1 has a gate", allow_module_level=True)

from recorded import runner
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import vllm_specplugins
from vllm_specplugins.engine.messages import Emitted, StepFacts, StepNews
from vllm_specplugins.engine.scheduler import PlannedScheduler, StepLengths
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to

K, NUM_TOKENS = 5, 24


class Played:
    """An engine, two steps deep, whose clock is ours: drafts are planned a step before they are made.

    Args:
        accept_prob: of a draft token to be right, if those before it are.
        token_ms: of each token that is verified.
    """

    def __init__(self, accept_prob: float, token_ms: float, num_reqs: int = 8):
        self.now, self.accept_prob, self.token_ms, self.rng = 0.0, accept_prob, token_ms, np.random.default_rng(0)
        self.lengths, self.ids = (
            StepLengths(StepTimes(lengths_up_to(K)), lambda: self.now / 1000),
            {f"r{i}": 1 for i in range(num_reqs)},
        )

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
                num_scheduled_tokens=self.ids, scheduled_spec_decode_tokens=drafts,
                total_num_scheduled_tokens=len(self.ids) * (1 + verified), num_spec_tokens_to_schedule=length,
                specplugins=StepNews(verifies=verified),
            )  # fmt: skip
            self.lengths.tell(scheduled, SimpleNamespace(sampled_token_ids=[[0] * n for n in emitted]))
            drafted.append(length)
        return drafted[1:]


@pytest.mark.parametrize(("accept_prob", "token_ms", "best"), [(0.9, 0.01, K), (0.05, 0.3, 0), (0.9, 5.0, 0)])
def test_what_pays(accept_prob: float, token_ms: float, best: int) -> None:
    """But for trials. Fails if a step's time is laid to the drafts that it makes and not to those that it verifies, or
    if nothing is tried any more."""
    drafted = Played(accept_prob, token_ms).steps(1000)[200:]
    assert np.mean([length == best for length in drafted]) > 0.9 and len(set(drafted)) > 1
    assert drafted[::2] == drafted[1::2] or drafted[1:-1:2] == drafted[2::2], "a length holds for two steps"


def test_what_is_told() -> None:
    """Fails if a step counts that drafts more than it verifies; if one that takes a prompt in, or comes after a pause,
    says what steps take; if one of another batch than the step before says nothing; or if what was trimmed counts."""
    clock = iter(range(20))
    lengths, seen = StepLengths(StepTimes(lengths_up_to(K)), lambda: next(clock) / 1000), []
    lengths.times.add = lambda *step: seen.append(step)  # type: ignore[assignment]

    def step(ids: str, prompt: int = 0, length: int = 2) -> None:
        drafts = {name: [-1, -1] for name in ids}
        num_tokens = dict.fromkeys(ids, 3) | ({"new": prompt} if prompt else {})
        scheduled = SimpleNamespace(
            num_scheduled_tokens=num_tokens, scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=sum(num_tokens.values()), num_spec_tokens_to_schedule=length,
            specplugins=StepNews(verifies=2),
        )  # fmt: skip
        order = {name: row for row, name in enumerate(reversed(num_tokens))}
        emitted = [[7] * (3 if name == "b" else 1) for name in order]
        output = SimpleNamespace(
            sampled_token_ids=emitted, req_id_to_index=order, specplugins=StepFacts(num_verified=2)
        )
        lengths.tell(scheduled, output)

    for ids, prompt, length in (("ab", 0, 2), ("a", 0, 2), ("ab", 0, 4), ("ab", 9, 2), ("", 9, 2), ("cb", 0, 2)):
        step(ids, prompt, length)
    lengths.pause()
    step("ab")
    told = [(num_reqs, length, round(ms, 6), sorted(rows), share) for num_reqs, length, ms, rows, share in seen[1:-1]]
    assert told == [(1, 2, 1, [1], 1), (2, 2, 1, [1, 3], 4 / 13), (2, 2, 1, [1, 3], 1)]
    assert [ms == ms for _, _, ms, *_ in seen] == [False, True, True, True, False]


def churned(fixed: int | None, accept_prob: float, draft_ms: float, token_ms: float, most: int) -> float:
    """Returns the tokens per ms of 256 requests of 128 tokens each; when one ends, a request with a prompt of 64 tokens
    arrives.

    Steps have the costs of an 8 B model, with `draft_ms` for each draft token, of which at most `most` are verified.
    `fixed` is the draft length; None: the plugin chooses it, and the result begins after 400 steps.
    """
    after = 400 if fixed is None else 100
    rng, now, drafted, at = np.random.default_rng(0), 0.0, K, []
    own = StepLengths(StepTimes(lengths_up_to(K), trims=most < K), lambda: now / 1000)
    left, comes, ids = rng.integers(1, 128, 256), np.zeros(256, bool), [str(row) for row in range(256)]
    for step in range(after + 400):
        length = own[256] if fixed is None else fixed
        right = (rng.random((256, K)) < accept_prob).cumprod(axis=1)[:, : min(drafted, most)].sum(axis=1)
        emitted, counts = np.where(comes, 1, 1 + right), np.where(comes, 64, 1 + drafted)
        drafts = {name: [-1] * drafted for name, new in zip(ids, comes, strict=True) if drafted and not new}
        verified = len(drafts) * min(drafted, most)
        num_tokens = int(counts.sum()) - len(drafts) * drafted + verified
        now += (5.3 + token_ms * max(0, num_tokens - 180) + draft_ms * drafted) * rng.lognormal(0, 0.03)
        scheduled = SimpleNamespace(
            num_scheduled_tokens=dict(zip(ids, counts.tolist(), strict=True)), scheduled_spec_decode_tokens=drafts,
            total_num_scheduled_tokens=int(counts.sum()), num_spec_tokens_to_schedule=length,
            specplugins=StepNews(verifies=drafted),
        )  # fmt: skip
        output = SimpleNamespace(
            sampled_token_ids=[[0] * n for n in emitted.tolist()], specplugins=StepFacts(num_verified=verified),
            req_id_to_index={name: row for row, name in enumerate(ids)},
        )  # fmt: skip
        if fixed is None:
            own.tell(scheduled, output)
        at.append((emitted.sum(), now))
        drafted, left = length, left - emitted
        comes = left <= 0
        left[comes] = 128
        ids = [f"{step} {row}" if comes[row] else name for row, name in enumerate(ids)]
    return float(sum(count for count, _ in at[after:]) / (at[-1][1] - at[after - 1][1]))


@pytest.mark.parametrize(
    ("accept_prob", "draft_ms", "token_ms", "most"),
    [(0.6, 0.0, 0.027, K), (0.9, 1.0, 0.027, 1), (0.9, 0.3, 0.004, K), (0.9, 0.3, 0.004, 2)],
)
def test_churn(accept_prob: float, draft_ms: float, token_ms: float, most: int) -> None:
    """Nearly each step takes prompts in. Fails if those steps tell nothing, or if their time is laid to decoding."""
    cell = accept_prob, draft_ms, token_ms, most
    fixed, own = [churned(length, *cell) for length in (0, 1, K)], churned(None, *cell)
    assert own >= 0.95 * max(fixed) and own >= 0.985 * fixed[0]


@pytest.mark.skipif(not TAPES, reason="needs graphs")
def test_lengths_that_change(engine: Any) -> None:
    """Steps without drafts among others, which emit what no speculation does. Fails if a draft that was
    not made is verified, if what is left in a buffer is, or if a request's tokens are not counted."""
    prompts = mixed_prompts(str(DEMO_MODEL), 4)
    expected = generate(engine(enforce_eager=True), prompts, [4], max_tokens=NUM_TOKENS)
    llm = engine(PROMPT_LOOKUP, async_scheduling=True)
    scheduler, told = llm.llm_engine.engine_core.engine_core.scheduler, []
    assert isinstance(scheduler.dynamic_sd_lookup, StepLengths)

    class Turns:
        def __getitem__(self, num_reqs: int) -> int:
            told.append((0, 0, 0, 4, 4, 2, 1)[len(told) % 7])
            return told[-1]

    before, progress_before = llm.collective_rpc("specplugins_stats")[0], progress(llm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "dynamic_sd_lookup", Turns())
        assert generate(llm, prompts, [4], max_tokens=NUM_TOKENS) == expected
    after = llm.collective_rpc("specplugins_stats")[0]
    assert after["faults"] == {} and after["drafted_tokens"] > before["drafted_tokens"]
    assert (progress(llm) - progress_before).sum() == 4 * (NUM_TOKENS - 1)
    assert runner(llm).speculator.tally._drafted in (0, 1, 2, 4)


@pytest.mark.skipif(not TAPES, reason="needs graphs")
def test_files_of_a_step(engine: Any) -> None:
    """Those of ours that a steady step of a lookup calls, without those that only a graph's recording calls, and with
    those of a report of metrics; on a CPU tensors pass one more, the host's search. The goal is 32. Kills: one more
    file in each step."""
    llm = engine(PROMPT_LOOKUP, async_scheduling=True)
    called = set[str]()
    for index, prompt in enumerate(mixed_prompts(str(DEMO_MODEL), 2)):
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        llm.llm_engine.add_request(f"files {index}", {"prompt_token_ids": prompt}, params)
    for step in range(200):
        if 4 <= step < 6:
            sys.setprofile(lambda frame, event, _: event == "call" and called.add(frame.f_code.co_filename))
        llm.llm_engine.step()
        sys.setprofile(None)
        if not llm.llm_engine.has_unfinished_requests():
            break
    root = Path(vllm_specplugins.__file__).parents[1]
    folders = root / "vllm_specplugins", root / "kernels"
    ours = [path for path in {Path(name).resolve() for name in called} if any(map(path.is_relative_to, folders))]
    assert 20 < len(ours) <= 34, sorted(ours)


@pytest.mark.skipif(not TAPES, reason="needs graphs")
def test_graphs_where_nothing_trims(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a step that drafts nothing has no graph of its own, or one that drafts K has none any more."""
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(
        "vllm_specplugins.engine.frontend.spec_config._untrimmed_for", lambda vllm_config: "this is a test"
    )
    engine.stop()
    llm = engine(PROMPT_LOOKUP, async_scheduling=True, **graphs((2, 10)))
    assert runner(llm).adaptive_verification is None
    assert isinstance(llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup, StepLengths)
    width = PROMPT_LOOKUP["num_speculative_tokens"]
    for length in (0, width):
        mode = runner(llm).cudagraph_manager.dispatch(2, 2 * (1 + length), 1 + length, 0).cg_mode
        assert mode == CUDAGraphMode.FULL, length
    engine.stop()


def planned(found: list[int], most: int, room: int = 100, **attributes: Any) -> list[int]:
    """How many of so many tokens are planned for requests whose last drafts had so many, and that may have so many."""
    scheduler = PlannedScheduler.__new__(PlannedScheduler)
    scheduler._cut = {}
    scheduler._emitted, scheduler._watch = Emitted(), SimpleNamespace(taken=lambda: None)
    scheduler._planned = {str(row): length for row, length in enumerate(found)}
    scheduler._has_options, scheduler._plans_whole, scheduler._lengths = False, False, None
    scheduler.num_spec_tokens, scheduler.max_model_len, scheduler._drafted = most, 9 + room, 0
    scheduler._scheduled, scheduler.max_num_scheduled_tokens = set(), 1024
    scheduler._has_graphs, scheduler._num_beside = attributes.pop("has_graphs", True), 0
    state = {"num_tokens": 8, "num_prompt_tokens": 5, "max_tokens": 1000, "use_structured_output": False} | attributes
    params = SimpleNamespace(max_tokens=1000, extra_args=None)
    scheduler.requests = {
        name: SimpleNamespace(request_id=name, spec_token_ids=[-1] * most, sampling_params=params, **state)
        for name in scheduler._planned
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncScheduler, "_update_after_schedule", lambda *_: None)
        step = SimpleNamespace(
            num_scheduled_tokens=scheduler._planned, num_spec_tokens_to_schedule=most, scheduled_spec_decode_tokens={},
            total_num_scheduled_tokens=0,
        )  # fmt: skip
        scheduler._update_after_schedule(step)
    return [len(request.spec_token_ids) for request in scheduler.requests.values()]


def test_plans_of_full_graphs() -> None:
    """Where nothing trims. Fails if a batch leaves its graph for tokens that cost nothing, if tokens are planned that
    do, or that a request has no room for, or beside a grammar; or where nothing is found."""
    assert planned([3, 0], 31) == [31, 31] and planned([3], 31) == [31] and planned([0, 0], 31) == [0, 0]
    assert planned([3, 0, 1], 31) == [3, 0, 1] and planned([2] + [0] * 9, 5) == [5] * 10
    assert planned([3, 0], 31, has_graphs=False) == planned([3, 0], 31, use_structured_output=True) == [3, 0]
    assert planned([3, 0], 31, room=20) == [3, 0] and planned([9, 0], 31, room=8) == [7, 0]


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
