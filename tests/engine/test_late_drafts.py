"""Late drafts on Model Runner V2: which tokens the proposer reads and when, and how the device uses its drafts."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import STRESS, generate
from conftest import FEW, RUNNER, counted, spec_metrics
from recorded import runner

from vllm_specplugins.draft import Draft, DraftBatch, Feedback
from vllm_specplugins.engine.session import Session
from vllm_specplugins.engine.v2.feedback.report import SampledTokens
from vllm_specplugins.engine.v2.requests import Request
from vllm_specplugins.engine.v2.speculators import late
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import MAX_FAULTS

pytestmark = pytest.mark.skipif(RUNNER == "v1", reason="V1 waits for its drafts")
K, NUM_SLOTS, MOST_TOKENS, PROMPTS, NUM_TOKENS = 4, 3, 400, FEW, 32
TEXT = np.random.default_rng(0).permutation(MOST_TOKENS).astype(np.int32)  # of all requests; no token comes twice


class Oracle:
    """Knows how every text goes on; tells what it was asked, and does what a test plants."""

    may_be_late = True
    texts: ClassVar[list[list[int]]] = []

    def __init__(self, options: Any = None, context: Any = None):
        self.seen: list[Any] = []
        self.before: Callable[[], Any] = lambda: None
        self.width = late.late_length(K)

    def propose(self, batch: DraftBatch) -> Draft:
        self.before()
        self.seen.append({name: len(text) for name, text in zip(batch.request_ids, batch.token_ids, strict=True)})
        token_ids, num_draft = np.zeros((batch.num_reqs, self.width), np.int32), np.zeros(batch.num_reqs, np.int32)
        for row, own in enumerate(batch.token_ids):
            text = next((text for text in self.texts if text[: len(own)] == own.tolist()), [])
            known = text[len(own) :][: batch.max_num_draft[row]]
            token_ids[row, : len(known)], num_draft[row] = known, len(known)
        return Draft(token_ids, num_draft)

    def observe(self, feedback: Feedback) -> None: ...

    def forget(self, request_ids: Any) -> None:
        self.seen.append(("forget", *request_ids))


class Steps:
    """A device and its runner: requests sample the tokens of TEXT; a step's tokens arrive when a test says so."""

    def __init__(self, budget_ms: float = 60_000):
        self.states = SimpleNamespace(
            max_num_reqs=NUM_SLOTS,
            max_model_len=MOST_TOKENS,
            req_id_to_index={},
            all_token_ids=SimpleNamespace(gpu=torch.full((NUM_SLOTS, MOST_TOKENS), -7, dtype=torch.int32)),
            total_len=SimpleNamespace(gpu=torch.zeros(NUM_SLOTS, dtype=torch.int32)),
        )
        self.proposer, self.on_their_way = Oracle(), list[list[bool]]()
        self.barrier = FaultBarrier(self.proposer, MOST_TOKENS, K, budget_ms)
        self.late = late.LateDrafts(self.states, K, MOST_TOKENS, torch.device("cpu"))
        self.late.guard = self.barrier.guard
        self.session = Session(self.barrier, late=self.late)

    def add(self, name: str, slot: int, num_tokens: int = 10, prompt: Any = TEXT) -> None:
        self.states.req_id_to_index[name] = slot
        self.states.all_token_ids.gpu[slot, :num_tokens] = torch.from_numpy(prompt[:num_tokens])
        self.states.total_len.gpu[slot] = num_tokens
        new = SimpleNamespace(req_id=name, prefill_token_ids=prompt[:num_tokens].tolist(), prompt_embeds=None)
        new.sampling_params, new.prompt_len = SimpleNamespace(extra_args=None), num_tokens
        self.late.add([Request(new, slot, MOST_TOKENS, reads_tokens=True)])

    def sample(self, num: int, *names: str, arrives: bool = True) -> None:
        """A step in which each request emits so many tokens."""
        arrived, rows = [arrives], []
        for slot in (self.states.req_id_to_index[name] for name in names):
            start = int(self.states.total_len.gpu[slot])
            rows.append(TEXT[start : start + num])
            self.states.all_token_ids.gpu[slot, start : start + num] = torch.from_numpy(rows[-1])
            self.states.total_len.gpu[slot] += num
        self.on_their_way.append(arrived)
        event: Any = SimpleNamespace(query=lambda: arrived[0])
        self.late.note(SampledTokens(list(names), event, np.array(rows), np.full(len(names), num, np.int32)))

    def step(self, most: int = K) -> None:
        """Asks, and waits until the proposer is done with it."""
        self.late.step(most)
        thread: Any = self.barrier.guard._thread
        for _ in range(2000):
            if not thread.is_busy:
                return
            time.sleep(0.001)

    def drafts(self, *slots: int, most: int = K) -> list[list[int]]:
        found = self.late.match(torch.tensor(slots), torch.full((len(slots),), most, dtype=torch.int32))
        return [row[:num] for row, num in zip(found[0].tolist(), found[1].tolist(), strict=True)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    monkeypatch.setattr(late, "get_tp_group", lambda: SimpleNamespace(rank_in_group=0, world_size=1))
    monkeypatch.setattr(Oracle, "texts", [TEXT.tolist()])
    yield Steps()


def begun(steps: Steps) -> Steps:
    """Two requests, the drafts of which are in the table."""
    steps.add("a", 2)
    steps.add("b", 0, 30)
    steps.sample(1, "a", "b")
    steps.step()
    steps.late.step(K)
    return steps


@pytest.mark.parametrize("since", range(3))
def test_what_was_sampled_since_is_dropped(steps: Steps, since: int) -> None:
    """Kills: a draft that is not shifted, or is shorter than 3 K + 2; a row of another slot; limits that are not those
    of the step."""
    begun(steps)
    for _ in range(since):
        steps.sample(K + 1, "a", "b", arrives=False)
    ends = 11 + since * (K + 1), 31 + since * (K + 1)
    expected = [TEXT[end : end + K].tolist() for end in ends]
    assert steps.drafts(2, 0) == expected and steps.drafts(1) == [[]]
    assert steps.drafts(2, 0, most=2) == [tokens[:2] for tokens in expected]
    _, lengths, matches = steps.late.match(torch.tensor([2, 0]), torch.tensor([K, 0], dtype=torch.int32))
    assert matches.tolist() == [1 + since * (K + 1), 0] and lengths.tolist() == [K, 0]


def test_a_draft_that_was_wrong(steps: Steps) -> None:
    """Kills: tokens that go on after one that the target rejected."""
    begun(steps)
    steps.sample(3, "a", "b", arrives=False)
    steps.states.all_token_ids.gpu[2, 12] += 1
    assert steps.drafts(2, 0) == [[], TEXT[34 : 34 + K].tolist()]


def test_another_request_in_the_slot(steps: Steps) -> None:
    """Of the same text, so that a row of another's would pass. Kills: a row that stays in the table, and one that was
    on its way meanwhile."""
    begun(steps)
    steps.sample(1, "a")
    steps.step()  # a draft is ready, and nobody has taken it
    steps.late.remove(["a"])
    steps.add("c", 2)
    assert steps.drafts(2) == [[]]
    steps.step()
    assert steps.drafts(2) == [[]]
    steps.sample(1, "c")
    steps.step()
    steps.late.step(K)
    assert steps.drafts(2) == [TEXT[11 : 11 + K].tolist()]


def test_the_last_tokens_come_before_forgetting(steps: Steps) -> None:
    """Though they arrive when the request is over, and one of its name is back. Kills: a text that ends early in a
    store; two requests of one name in a batch; a request without tokens that is kept."""
    begun(steps)
    steps.add("never", 1)
    steps.sample(5, "a", arrives=False)
    steps.late.remove(["a", "never"])
    steps.add("a", 2, 14)
    steps.sample(1, "a", "b", arrives=False)
    steps.step()
    assert steps.proposer.seen == [{"a": 11, "b": 31}], "nothing has come"
    for arrived in steps.on_their_way:
        arrived[0] = True
    steps.session.settle()
    assert steps.proposer.seen[1:] == [{"a": 16, "b": 32}, ("forget", "a")]
    steps.sample(1, "a")
    steps.step()
    assert steps.proposer.seen[3:] == [{"a": 16}] and steps.late._ended == []


def test_nothing_is_kept_for_who_does_not_answer(steps: Steps) -> None:
    """It hangs: one fault, no wait, as much as MAX_UNREAD steps kept; then it drafts for who comes. Kills: a hang that
    nobody counts; tokens that pile up; a text with a hole."""
    release = threading.Event()
    steps.add("a", 2)
    steps.proposer.before = release.wait
    steps.barrier.guard._budget_ms = 50
    steps.sample(1, "a")
    steps.late.step(K)
    time.sleep(0.1)
    steps.late.step(K)
    assert steps.barrier.counters.faults == {"hangs": 1}
    for _ in range(3 * late.MAX_UNREAD):
        steps.sample(1, "a")
        steps.late.step(K)
        assert len(steps.late._unread) + len(steps.late._read) <= late.MAX_UNREAD
    assert steps.late._requests == {} and steps.late._unread == steps.late._read == late.deque()
    assert steps.barrier.counters.faults == {"hangs": 1}
    steps.barrier.guard._budget_ms = 60_000
    release.set()
    steps.step()
    steps.add("c", 0)
    steps.sample(1, "c")
    steps.step()
    steps.late.step(K)
    assert steps.drafts(2, 0) == [[], TEXT[11 : 11 + K].tolist()]
    assert ("forget", "a") in steps.proposer.seen


def test_where_nothing_is_drafted(steps: Steps) -> None:
    """The proposer sees the tokens, now and then, and drafts none. Kills: a store that misses them; drafts in vain."""
    begun(steps)
    steps.step(0)
    for _ in range(late.MAX_UNREAD + 1):
        steps.sample(1, "a")
        time.sleep(0.001)
    steps.session.settle()
    assert steps.proposer.seen[-1]["a"] == 12 + late.MAX_UNREAD and len(steps.proposer.seen) < 5
    assert steps.late._requests.keys() == {"a", "b"}


def test_one_that_raises_is_switched_off(steps: Steps) -> None:
    """Fails if faults in the thread are not counted."""
    steps.proposer.before = lambda: 1 / 0
    steps.add("a", 2)
    for _ in range(MAX_FAULTS + 2):
        steps.sample(1, "a")
        steps.step()
    assert steps.barrier.counters.faults == {"raised": MAX_FAULTS} and steps.barrier.counters.switched_off
    assert steps.drafts(2) == [[]]


CUSTOM = {"method": "custom", "proposer": "test_late_drafts:Oracle", "num_speculative_tokens": K}


@pytest.fixture
def served(engine: Any, prompts: Any, plainly: Any) -> Any:
    llm = engine(CUSTOM)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    import test_late_drafts as the_engines

    the_engines.Oracle.texts = [prompt + tokens for prompt, tokens in zip(prompts, plainly, strict=True)]
    return llm


@pytest.fixture(scope="module")
def plainly(engine: Any, prompts: Any) -> list[list[int]]:
    return generate(engine(), prompts, [8], max_tokens=NUM_TOKENS)


def planted(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[np.ndarray], Any]) -> None:
    drafted = late.LateDrafts._drafted

    def spoilt(*arguments: Any) -> Any:
        requests, rows = drafted(*arguments)
        spoil(rows)
        return requests, rows

    monkeypatch.setattr(late.LateDrafts, "_drafted", spoilt)


@pytest.mark.slow
def test_what_is_wrong_costs_drafts_alone(
    served: Any, prompts: Any, plainly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of drafts that are right most are accepted; of those of another place or request hardly any, and outputs are the
    same. Fails if what is accepted is not told from what is not."""
    outputs, _, accepted = counted(served, lambda: generate(served, prompts, [8], max_tokens=NUM_TOKENS))
    assert outputs == plainly
    assert accepted > len(prompts) * NUM_TOKENS // 3

    def not_dropped(rows: np.ndarray) -> None:
        rows[:, 1] += 1

    def of_another(rows: np.ndarray) -> None:
        rows[:, 0] = np.roll(rows[:, 0], 1)

    for spoil in (not_dropped, of_another):
        with monkeypatch.context() as patch:
            planted(patch, spoil)
            outputs, _, fewer = counted(served, lambda: generate(served, prompts, [8], max_tokens=NUM_TOKENS))
        assert outputs == plainly and fewer < accepted // 3, spoil


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raised", "hangs"])
def test_one_that_fails(served: Any, prompts: Any, plainly: Any, kind: str) -> None:
    """A fault costs only the drafts, and the engine continues without waiting. Fails if a fault affects a request, or
    is not counted."""
    speculator = runner(served).speculator
    vocab_size = served.llm_engine.model_config.get_vocab_size()
    proposer, release = Oracle(), threading.Event()
    barrier = speculator.session.barrier
    FaultBarrier.__init__(barrier, proposer, vocab_size, K, 200 if kind == "hangs" else 60_000)
    speculator.late.guard = barrier.guard
    proposer.before = release.wait if kind == "hangs" else lambda: 1 / 0
    assert generate(served, prompts, [8], max_tokens=NUM_TOKENS) == plainly
    release.set()
    assert barrier.counters.faults == {kind: 1 if kind == "hangs" else MAX_FAULTS}


@pytest.mark.slow
def test_preempted_and_aborted(served: Any, engine: Any, prompts: Any, plainly: Any) -> None:
    """Fails if a request that is back is drafted for from what it had before, or one that is gone is kept."""
    llm = engine(CUSTOM, **STRESS)
    llm.llm_engine.add_request("gone", {"prompt_token_ids": prompts[0]}, llm.get_default_sampling_params())
    for _ in range(4):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone"])
    outputs, _, accepted = counted(llm, lambda: generate(llm, prompts, [8], max_tokens=NUM_TOKENS))
    assert outputs == plainly
    assert accepted > len(prompts) and spec_metrics(llm)["preemptions"] > 0
    llm.collective_rpc("specplugins_store")  # settles
    assert len(runner(llm).speculator.lookups.late._requests) <= 1, "of the last one's end the worker has not heard"
