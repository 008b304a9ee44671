"""Random schedules, without a model: what we say of a step, beside what is true of each of its requests.

vLLM's real scheduler, ours, and V2's objects on the host play budgets, arrivals, aborts, preemptions, requests that a
step leaves out, and lengths of our choice. The class: a fact about a step that is applied to every request."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import played_scheduler
import pytest
import torch
from conftest import ALL, RUNNER
from played_scheduler import Played
from test_plugin import engine_config

if RUNNER != "v2":
    pytest.skip("V1 has a gate", allow_module_level=True)

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_specplugins.counters import Counters
from vllm_specplugins.engine.messages import DraftLengths, StepFacts, send_facts
from vllm_specplugins.engine.v2.feedback import report as tallies
from vllm_specplugins.engine.v2.feedback.report import Tally
from vllm_specplugins.gate.step_times import StepTimes, lengths_up_to

WITHOUT_TAPES = "no engine"
NUM_SCHEDULES, NUM_STEPS = (2000, 200) if ALL else (24, 50)
K = 7


@lru_cache
def base_config(asynchronous: bool) -> Any:
    config = {"method": "prompt_lookup", "num_speculative_tokens": K}
    sizes = {"block_size": 16, "max_num_seqs": 300, "max_model_len": 512, "enable_prefix_caching": False}
    return engine_config(config, async_scheduling=asynchronous, **sizes)


def sized(_: Any, asynchronous: bool, tokens: int, seats: int, **others: Any) -> Any:
    """An engine's configuration; making one takes as long as a hundred steps."""
    config = base_config(asynchronous)
    config.scheduler_config.max_num_batched_tokens = config.scheduler_config.max_num_scheduled_tokens = tokens
    config.scheduler_config.max_num_seqs = seats
    return config


def is_over(request: Any) -> bool:
    """Whether a step under way is known to bring its last token, so that vLLM schedules no other one."""
    end = request.num_prompt_tokens + request.max_tokens
    return bool(
        request.num_output_placeholders > 0 and request.num_computed_tokens + 2 - request.num_output_placeholders >= end
    )


class Checked(Played):
    """Beside each request, the newest draft that was made for it: its length, and in which step."""

    def __init__(self, rng: np.random.Generator, asynchronous: bool, **sizes: Any):
        super().__init__(None, accept_prob=float(rng.random()), asynchronous=asynchronous, **sizes)
        self._made, self._number, self._facts = dict[str, tuple[int, int]](), 0, dict[int, Any]()
        self._times, self.now, self._token_ms = rng, 0.0, float(rng.choice([0.01, 1.0]))
        self._ranks = [Tally(1, K, 0, torch.device("cpu")) for _ in range(2)]
        self.rests, self.stale, self.told, self.shortened = 0, 0, 0, 0
        self._trims = bool(rng.integers(2))
        self._lengths_of = lengths = self.scheduler._lengths
        lengths._clock, lengths.times = lambda: self.now, StepTimes(lengths_up_to(K), trims=self._trims)
        lengths.times.add = self._hear(lengths.times.add)
        tell = lengths.tell

        def telling(scheduled: Any, output: Any) -> None:
            self._telling = self._facts.pop(id(scheduled))
            tell(scheduled, output)

        lengths.tell, schedule = telling, self.scheduler.schedule

        def watched() -> Any:
            self._plans = {each.request_id: len(each.spec_token_ids) for each in self.scheduler.running}
            scheduled = schedule()
            for name in scheduled.preempted_req_ids or ():  # its draft is gone
                self._made.pop(name, None)
            self._check_room(scheduled)
            return scheduled

        self.scheduler.schedule = watched

    def _hear(self, add: Any) -> Any:
        def heard(num_reqs: int, length: int, ms: float, emitted: list[int], share: float) -> None:
            """Checks that the previous step made all drafts of a step with the chosen length, and that none was
            shortened."""
            drafts, self.told = self._telling, self.told + 1
            assert all(made == length and is_last and is_whole for made, is_last, is_whole in drafts), (length, drafts)
            assert not (drafts and length == 0) and max(emitted, default=1) <= 1 + length
            add(num_reqs, length, ms, emitted, share)

        return heard

    def _check_room(self, scheduled: SchedulerOutput) -> None:
        """A step shortens all drafts alike, as far as its requests need it, and leaves no request out for them."""
        limit = self.scheduler.draft_limit
        drafts, names = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
        if limit is not None:
            self.shortened += 1
        if scheduled.preempted_req_ids:  # for memory
            return
        out = [each for each in self.scheduler.running if each.request_id not in names]
        is_full = scheduled.total_num_scheduled_tokens == self.scheduler.max_num_scheduled_tokens
        if is_full and not scheduled.scheduled_new_reqs and not scheduled.scheduled_cached_reqs.resumed_req_ids:
            ready = [each for each in out if each.next_decode_eligible_step <= self._left_until and not is_over(each)]
            assert not (drafts and ready), "a draft takes the token of a request"
        kept = {name: min(K if limit is None else limit, self._plans.get(name, 0)) for name in names}
        assert {name: len(ids) for name, ids in drafts.items()} == {name: num for name, num in kept.items() if num}
        if limit is not None and not self.scheduler.waiting and not self.scheduler.kv_holding_waiting:
            wanted = sum(min(plan, limit + 1) for plan in self._plans.values())
            needed = sum(
                max(0, each.num_tokens + each.num_output_placeholders - each.num_computed_tokens) for each in out
            ) + sum(names[name] - len(drafts.get(name, ())) for name in names)
            is_long = needed - len(names) - len(out) >= 200  # then prompts have a share of the step
            assert is_long or needed + wanted > self.scheduler.max_num_scheduled_tokens, limit

    def _rest(self, batch: Any, length: int) -> bool:
        """Whether the ranks rest in this step, of which a reader of metrics asks one."""
        rests = {tally.rests(batch, length) for tally in self._ranks}
        for tally in self._ranks:
            tally.note(length, batch.num_reqs if True in rests else 0)
        if self._times.random() < 0.3:
            self._ranks[0].move_to(Counters(), [])
        assert len(rests) == 1, "one rank runs a speculator, and waits for the other one in it"
        return rests.pop()

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        drafts, length = scheduled.scheduled_spec_decode_tokens, scheduled.num_spec_tokens_to_schedule
        names = scheduled.num_scheduled_tokens
        sizes = {name: len(ids) for name, ids in drafts.items()}
        made = {name: self._made.get(name, (0, 0))[0] for name in sizes}
        assert all(size <= made[name] for name, size in sizes.items()), "a draft that was not made is verified"
        assert scheduled.total_num_scheduled_tokens <= self.scheduler.max_num_scheduled_tokens
        self._facts[id(scheduled)] = [
            (self._made[name][0], self._made[name][1] == self._number - 1, size == self._plans[name])
            for name, size in sizes.items()
        ]
        self.stale += sum(self._made[name][1] != self._number - 1 for name in sizes)
        has_prefill = any(self.scheduler.requests[name].is_prefill_chunk for name in names) or bool(
            scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids
        )
        batch = SimpleNamespace(has_prefill=has_prefill, num_draft_tokens=sum(sizes.values()), num_reqs=len(names))
        if names and self._rest(batch, length):  # vLLM then samples without a speculator
            self.rests += 1
            assert not sizes and length == 0, "a step at rest verifies a draft"
        output = super()._run(scheduled)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if tokens:
                self._drafts[name] = min(self._drafts[name], length)
                self._made[name] = length, self._number
        self._number += bool(names)
        self.now += 0.001 * (5 + self._token_ms * scheduled.total_num_scheduled_tokens)
        if not self._trims and self.is_ahead:
            lengths = [self._drafts.get(name, 0) for name in output.req_ids]
            send_facts(output, StepFacts(DraftLengths(output.req_ids, lengths)))
        return output

    def step(self) -> None:
        """Sometimes leaves requests out, as an encoder's cache, a connector or a pipeline does: a few, or most of them,
        which come back together."""
        self._left_until, rng = self.scheduler.current_step + 1, self._times
        share, together = float(rng.choice([0, 0.1, 0.8], p=[0.5, 0.4, 0.1])), int(rng.integers(1, 4))
        for request in self.scheduler.running:
            if rng.random() < share:
                steps = together if share > 0.5 else int(rng.integers(1, 4))
                request.next_decode_eligible_step = self._left_until + steps
        super().step()


def played(seed: int, num_steps: int) -> Checked:
    rng = np.random.default_rng(seed)
    most = int(rng.choice([1, 2, 8, 40, 300]))
    tokens = max(8, int(most * rng.uniform(0.5, 10)))
    sizes = {"tokens": tokens, "seats": most, "num_blocks": 33 + int(most * rng.choice([0.3, 1, 12]))}
    play = Checked(rng, bool(seed % 4), **sizes)
    for step in range(num_steps):
        for index in range(int(rng.integers(1, 1 + max(1, most // 8))) if rng.random() < 0.3 else 0):
            prompt = rng.integers(0, 9, int(rng.integers(1, 40))).tolist()
            play.add(f"{step}-{index}", prompt, int(rng.integers(1, 40)))
        if rng.random() < 0.1 and play.scheduler.running:
            play.abort(str(rng.choice([each.request_id for each in play.scheduler.running])))
        play.step()
    play.run(30 * num_steps)
    play.check()
    return play


def test_facts_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a step at rest that verifies the draft of a request that the step before left out (`rests`); a step whose
    drafts are older, or were shortened, that counts as one of the newest length (`verifies`); a draft that takes the
    token of another request (`MakesRoom`); a draft verified beyond what was made."""
    monkeypatch.setattr(played_scheduler, "engine_config", sized)
    monkeypatch.setattr(tallies, "AsyncCopy", lambda _, totals: SimpleNamespace(values=totals.clone().numpy))
    plays = [played(seed, NUM_STEPS) for seed in range(NUM_SCHEDULES)]
    names = ("rests", "stale", "told", "shortened", "preempted")
    assert min(sum(getattr(play, name) for play in plays) for name in names) > 20
