"""Proposers built into vLLM as stages of a cascade: they must offer what they would draft after the whole history.

A draft model that is the target itself must offer the target's own continuation, at every step, whoever drafted before.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import STRESS, check_counted, generate, progress
from conftest import DEMO_MODEL, INTERPRETED, RUNNER, long, long_on_v2, spec_metrics
from eagle_heads import eagle_head, mtp_model, parallel_head
from families import EXIT_LAYER, VOCAB_SIZE, checkpoint

from vllm_specplugins.config import ConfigError
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.gate.gate import Gate
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.isolation.faults import MAX_FAULTS, RAISED
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config

pytestmark = pytest.mark.slow
K = 4
WIDTH = K if INTERPRETED else 12  # of prompt lookup; drafts as long as the outputs there would leave nobody preempted
OWN = min(K, WIDTH - 1)  # of the draft model
LONGEST = 12  # of a lookup beside a head that drafts K
PAUSE_S = 1.0 if INTERPRETED else 0.3  # longer than a step
PARALLEL = ["dflash", "dspark"]  # V2's alone
NUM_TOKENS = 11 if INTERPRETED else 25
NUM_PROMPTS = 9 if INTERPRETED else 24
LOOKUP = {"method": "prompt_lookup", "min_ngram": 1}  # the target repeats little else
BLOCKS = (1, 2, 3, 3)  # of the KV cache, per prompt; each soon wants one more, and there is none
TINY: dict[str, Any] = {**STRESS, "skip_tokenizer_init": True}
QUIET: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": TINY["max_model_len"]}


def draft_model() -> dict[str, Any]:
    return {"method": "draft_model", "model": str(checkpoint("llama"))}


def cascade(*stages: Any, policy: str = "auto", gate: str = "off", width: int = K) -> dict[str, Any]:
    return {
        "method": "cascade",
        "num_speculative_tokens": width,
        "stages": list(stages),
        "policy": policy,
        "gate": gate,
        "time_budget_ms": 60_000,  # a busy machine is no fault
    }


def beside_lookup(lookup: Any = LOOKUP, **more: Any) -> dict[str, Any]:
    """Its drafts may be three times as long as the draft model's."""
    return cascade(lookup, {**draft_model(), "num_speculative_tokens": OWN}, width=WIDTH, **more)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Mixed lengths, each with something to copy; the last one ends shortly before the end of the context."""
    generator = torch.Generator().manual_seed(4)
    longest = TINY["max_model_len"]
    lengths = [32 * BLOCKS[i % 4] - 9 - i % 7 for i in range(NUM_PROMPTS - 1)] + [longest - NUM_TOKENS // 2]
    prompts = []
    for length in lengths:
        phrase = torch.randint(VOCAB_SIZE, (1 + length // 3,), generator=generator).tolist()
        prompts.append(list(itertools.islice(itertools.cycle(phrase), length)))
    return prompts


@pytest.fixture(scope="module")
def expected(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Returns the target's outputs, with K more tokens than the tests below ask for."""
    return run(engine(model=str(checkpoint("llama")), **QUIET), prompts, NUM_TOKENS + K)


def run(llm: Any, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return generate(llm, prompts, [8], max_tokens=num_tokens)


def hits(llm: Any) -> float:
    """How many tokens the prefix cache has held of all prompts."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


class Offers:
    """What the built-in proposer offered at each step, by the history that it saw."""

    def __init__(self, llm: Any, monkeypatch: pytest.MonkeyPatch):
        self.by_history: dict[tuple[int, ...], list[int]] = {}
        self.chances: dict[tuple[int, ...], Any] = {}  # of these tokens, where the proposer says them
        self.num_steps = self.num_without = 0
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        ours = getattr(getattr(worker.model_runner, "speculator", None), "specplugins", None)
        self.is_on_device = hasattr(getattr(ours, "offers", None), "drafts")
        if self.is_on_device:
            self._ours, self._draft_step = ours, ours._draft_step
            monkeypatch.setattr(ours, "_draft_step", self._seen)
            return
        self._propose = worker._session.propose
        monkeypatch.setattr(worker._session, "propose", self._watched)

    def _watched(self, batch: Any, feedback: Any) -> Any:
        if batch.offer is None:
            self.num_without += 1
            return self._propose(batch, feedback)
        self.num_steps += 1
        offer = batch.offer.draft
        chances = offer.confidence if offer.confidence is not None else [None] * batch.num_reqs
        rows = zip(batch.token_ids, offer.token_ids, chances, batch.max_num_draft, strict=True)
        for history, tokens, sure, room in rows:
            if room and len(tokens):  # vLLM 0.33 asks for none where nobody can use them
                key = tuple(history.tolist())
                self.by_history[key] = tokens[:room].tolist()
                if sure is not None:
                    self.chances[key] = sure[:room]
        return self._propose(batch, feedback)

    def _seen(self, input_batch: Any, num_sampled: Any, num_rejected: Any, most: int) -> None:
        """On the device, where graphs find them."""
        ours, states = self._ours, self._ours._req_states
        offered = ours.offers.drafts(ours.offers._num_there.expand(input_batch.num_reqs).int())
        self.num_without += ours.offer is None
        self.num_steps += 1
        rows = zip(input_batch.idx_mapping.tolist(), num_sampled.tolist(), offered.num_draft.tolist(), strict=False)
        for row, (slot, sampled, num) in enumerate(rows):
            length = int(states.total_len.gpu[slot])
            room = min(num, states.max_model_len - 1 - length)
            if sampled and room > 0 and ours.offer is not None:
                key = tuple(states.all_token_ids.gpu[slot, :length].tolist())
                self.by_history[key] = offered.token_ids[row, :room].tolist()
                sure = ours.offers._accept_probs[row, :room]
                if not sure.isnan().any():
                    self.chances[key] = sure.cpu().numpy().copy()
        self._draft_step(input_batch, num_sampled, num_rejected, most)


def stats_of(llm: Any) -> Iterator[dict[str, Any]]:
    """The stages' counters, after a look at the faults."""
    [stats] = llm.collective_rpc("specplugins_stats")
    assert stats["faults"] == {}
    yield from stats["stages"].values()


def test_draft_model_keeps_in_step(engine: Any, prompts: Any, expected: Any, monkeypatch: Any) -> None:
    """Preemption, prefix-cache hits, chunked prefill and the end of the context, while prompt lookup drafts for many,
    three times as long.

    Kills: a built-in proposer that is not run where another stage drafts; another request's row; a batch without its
    drafts because one request nears the end; one that drafts as many tokens as the cascade, and not as its stage.
    """
    llm = engine(beside_lookup(), model=str(checkpoint("llama")), **TINY)
    offers = Offers(llm, monkeypatch)
    wanted, begun = [tokens[:NUM_TOKENS] for tokens in expected], progress(llm)
    assert run(llm, prompts) == wanted
    check_counted(llm, begun, wanted)
    assert run(llm, prompts[:8]) == wanted[:8], "from the prefix cache"
    assert spec_metrics(llm)["preemptions"] > 0
    assert offers.num_without == 0
    assert max(map(len, offers.by_history.values())) == OWN, "its own K"
    whole = {tuple(prompt): [*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)}
    for history, tokens in offers.by_history.items():
        [text] = [text for prompt, text in whole.items() if history[: len(prompt)] == prompt]
        rest = text[len(history) :]  # a request that has ended is drafted for once more
        assert tokens[: len(rest)] == rest[: len(tokens)]
    lookup, model = stats_of(llm)
    assert INTERPRETED or max(lookup["accepted_at"]) >= OWN, "longer than the model's"
    assert lookup["kept"] > 0 and model["accepted"] > 0 and (offers.is_on_device or model["ms"] > 0)


def test_a_fault_is_its_own_loss(engine: Any, prompts: Any, expected: Any, monkeypatch: Any, caplog: Any) -> None:
    """vLLM's drafter raises from its fifth step on: the log has one line, and the lookup continues alone.

    Fails if the fault affects a request, if each step logs it, or if the stage is called for ever.
    """
    llm = engine(beside_lookup(), model=str(checkpoint("llama")), **TINY)
    steps = change_drafter(llm, monkeypatch, lambda step: 1 / (step < 4))
    with caplog.at_level("WARNING", logger="vllm.specplugins"):
        assert run(llm, prompts) == [tokens[:NUM_TOKENS] for tokens in expected]
    [stats] = llm.collective_rpc("specplugins_stats")
    lookup, model = stats["stages"].values()
    assert model["faults"] == {"raised": 3} and model["switched_off"] and next(steps) == 4 + 3
    assert stats["faults"] == lookup["faults"] == {} and not stats["switched_off"]
    told = [record.getMessage() for record in caplog.records if record.name == "vllm.specplugins"]
    assert ["ZeroDivisionError" in message for message in told] == [True, False]
    assert "Stage 1 (draft_model) failed 3 times" in told[1]


@pytest.mark.parametrize(
    "method", [long_on_v2("eagle"), "eagle3", *([long("dflash"), long("dspark")] if INTERPRETED else ["mtp"])]
)
def test_heads_keep_in_step(engine: Any, prompts: Any, expected: Any, monkeypatch: Any, method: str) -> None:
    """Under stress and behind prompt lookup, whose drafts are three times as long, it offers what it offers where it
    drafts alone and nothing happens, also for a prompt that the prefix cache holds.

    Kills: hidden states of another layer, row or step; KV that misses tokens that others drafted, or that were cached;
    chances of another row.
    """
    if method == "mtp":
        stage, target = {"method": method}, {"model": str(mtp_model())}
        wanted = run(engine(**target, **QUIET), prompts)
    else:
        head = parallel_head(method) if method in PARALLEL else eagle_head(method)
        stage = {"method": method, "model": str(head)}
        target = {"model": str(checkpoint("llama"))}
        wanted = [tokens[:NUM_TOKENS] for tokens in expected]
    alone, beside = (Offers.__new__(Offers) for _ in range(2))
    by_itself, behind = cascade(stage, LOOKUP), cascade(LOOKUP, {**stage, "num_speculative_tokens": K}, width=LONGEST)
    for offers, config, arguments in ((alone, by_itself, QUIET), (beside, behind, TINY)):
        llm = engine(config, **target, **arguments)
        offers.__init__(llm, monkeypatch)  # type: ignore[misc]
        assert run(llm, prompts) == wanted
    for _ in range(2):  # 84 tokens: two full blocks, of which drafters of vLLM 0.32 compute the last one anew
        before = hits(llm)
        assert run(llm, prompts[3:4]) == wanted[3:4]
    assert hits(llm) == before + (32 if version("vllm").startswith("0.32") else 64)
    assert all(counters["kept"] for counters in stats_of(llm))
    both = alone.by_history.keys() & beside.by_history.keys()
    assert len(both) > 3 * len(prompts)
    # Alone it offers as many as the request may still emit; what has to be equal is where both offer something.
    places = {history: min(len(alone.by_history[history]), len(beside.by_history[history])) for history in both}
    assert all(alone.by_history[history][:n] == beside.by_history[history][:n] for history, n in places.items())
    assert sum(places.values()) > 6 * len(prompts)
    assert len(alone.chances) == (len(alone.by_history) if RUNNER == "v2" else 0), "V1's drafters say none"
    if RUNNER == "v2":
        found, again = (
            np.concatenate([offers.chances[history][:n] for history, n in places.items()]) for offers in (alone, beside)
        )
        np.testing.assert_allclose(found, again, atol=1e-3)
        assert 0 < found.min() < found.max() <= 1 and found.std() > 0.01


def test_checked_by_early_exit(engine: Any, prompts: Any, expected: Any) -> None:
    """`verify`: a draft model is the cheap stage, the target's first layers check it; asynchronous where that can be.

    Kills: two views of one KV cache that disturb each other; lookahead slots for one stage only.
    """
    exit_stage = {"method": "early_exit", "exit_layer": EXIT_LAYER}
    arguments = {**TINY, "async_scheduling": RUNNER == "v2"}
    llm = engine(cascade(draft_model(), exit_stage, policy="verify"), model=str(checkpoint("llama")), **arguments)
    assert run(llm, prompts) == [tokens[:NUM_TOKENS] for tokens in expected]
    model, checker = stats_of(llm)
    assert 0 < model["kept"] < model["drafted"] and checker["accepted"] > 0


def test_extended_and_gated(engine: Any, prompts: Any, expected: Any, monkeypatch: Any) -> None:
    """A draft model goes on where a lookup ends if that is what it would have begun with, and its time counts; on V2
    where the host drafts, as steps are not scheduled ahead.

    The gate is told steady times: by those of a busy machine it may keep a stage out. Fails if one is never asked, if
    a runner tells no times, or such as leave out what the drafter took.
    """
    arguments, prompts = (QUIET, prompts[:8]) if INTERPRETED else (TINY, prompts)  # few steps, and of one size
    arguments = {**arguments, "async_scheduling": False}
    lookup = {"method": "suffix_lookup"} if RUNNER == "v2" else LOOKUP
    llm = engine(beside_lookup(lookup, gate="auto"), model=str(checkpoint("llama")), **arguments)
    proposer = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._session.barrier.proposer
    told_ms = []

    def steady(told: list[float]) -> list[float]:
        told_ms.append(told[0])
        return [30.0, 0.01, told[2], *(0.01 for _ in told[3:])]

    monkeypatch.setattr(proposer, "_context", replace(proposer._context, agreed=steady))
    change_drafter(llm, monkeypatch, lambda step: time.sleep(PAUSE_S if 1 <= len(told_ms) < 3 else 0))
    assert run(llm, prompts, NUM_TOKENS + K) == expected[: len(prompts)]  # to where an output repeats itself
    assert len(told_ms) >= 4 and min(told_ms[1:3]) >= 1000 * PAUSE_S
    if not INTERPRETED:  # the steps there are too few for a gate that has just learned the costs
        assert all(stage["accepted"] for stage in stats_of(llm))


@pytest.mark.skipif(RUNNER == "v2", reason="its drafter drafts all K tokens, or one")
def test_another_length_in_each_step(engine: Any, prompts: Any, expected: Any, monkeypatch: Any) -> None:
    """Kills: a draft model whose KV cache misses tokens after a shorter draft, and one that drafts another number of
    tokens than the gate chooses."""
    lengths = itertools.cycle((2, 0, 3, 1))
    monkeypatch.setattr(Gate, "offer_length", lambda *_: next(lengths))
    llm = engine(beside_lookup(gate="auto"), model=str(checkpoint("llama")), **QUIET)
    offers = Offers(llm, monkeypatch)
    assert run(llm, prompts[:8]) == [tokens[:NUM_TOKENS] for tokens in expected[:8]]
    whole = {tuple(prompt): [*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)}
    for history, tokens in offers.by_history.items():
        [text] = [text for prompt, text in whole.items() if history[: len(prompt)] == prompt]
        rest = text[len(history) :]
        assert tokens[: len(rest)] == rest[: len(tokens)]
    assert set(map(len, offers.by_history.values())) == {1, 2, 3} and offers.num_without == 0


@pytest.mark.skipif(RUNNER == "v2", reason="its drafter drafts all K tokens, or one")
def test_a_fault_of_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: `offer_length` inside of the drafter's guard, where a fault of ours switches the drafter off; a step that
    reads fewer prompt tokens than a whole draft has, whose time counts as that of decoding."""
    from vllm_specplugins.engine.v1.built_in import BuiltInDrafter

    stage = {"method": "draft_model", "model": "m", "num_speculative_tokens": 2}
    config = parse_config(cascade(LOOKUP, stage, gate="auto"))
    proposer: Any = build_proposer(config, ProposerContext(VOCAB_SIZE, 64, 4, K, lambda text: []))
    barrier, asked = FaultBarrier(proposer, VOCAB_SIZE, K, None), list[int]()

    def propose(scheduler_output: Any, *_: Any) -> torch.Tensor:
        asked.append(scheduler_output.num_spec_tokens_to_schedule)
        return torch.full((1, asked[-1]), 7)

    lengths = np.array([2])
    rows = SimpleNamespace(num_tokens_no_spec=lengths, req_ids=["a"], num_computed_tokens_cpu=lengths)
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(built_in_tokens=2, parallel_drafting=False),
        drafter=type("EagleProposer", (), {})(), propose_draft_token_ids=propose, num_spec_tokens=K,
        effective_drafter_max_model_len=64, max_model_len=64, device="cpu", input_batch=rows,
    )  # fmt: skip
    drafter, scheduled = BuiltInDrafter(runner, barrier), SimpleNamespace(num_spec_tokens_to_schedule=K)
    scheduled.num_scheduled_tokens = {"a": 1}
    batch, none = DraftBatch(["a"], [np.array([1, 2], np.int32)], np.array([K], np.int32), [{}]), np.zeros(1, np.int32)

    def offers(num_prompt: int = 0, num_draft: int = 0) -> Any:
        barrier.guard.begin_step()
        scheduled.scheduled_spec_decode_tokens = {"a": [7] * num_draft}
        scheduled.total_num_scheduled_tokens = 1 + num_draft + num_prompt
        return drafter.draft(batch, none, [0], scheduled, [[2]], SimpleNamespace(max_seq_len=2), None)

    steps = [offers(), offers(num_draft=K), offers(num_prompt=1), offers(num_prompt=1, num_draft=K - 1)]
    assert [offer.has_prompt for offer in steps] == [False, False, True, True]
    assert steps[0].draft.token_ids.tolist() == [[7, 7]]
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "offer_length", lambda *_: 1 / 0)
        assert [offers().draft.token_ids.shape for _ in range(MAX_FAULTS + 1)] == [(1, 0)] * (MAX_FAULTS + 1)
    ours, theirs = barrier.totals(), barrier.totals().stages["1 draft_model"]
    assert (ours.faults, ours.switched_off) == ({RAISED: MAX_FAULTS}, True)
    assert (theirs.faults, theirs.switched_off) == ({}, False) and asked == [2] * 4 + [0] * (MAX_FAULTS + 1)


def change_drafter(llm: Any, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], Any]) -> Iterator[int]:
    """Has vLLM's drafter do this first in each of its steps from now on; returns what counts them."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    drafter, name = (runner.drafter, "propose") if RUNNER == "v1" else (runner.speculator, "_copy_request_inputs")
    steps, original = itertools.count(), getattr(drafter, name)

    def changed(*arguments: Any, **more: Any) -> Any:
        act(next(steps))
        return original(*arguments, **more)

    monkeypatch.setattr(drafter, name, changed)
    return steps


@pytest.mark.skipif(RUNNER == "v2", reason="the same on both runners")
@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({"method": "draft_model", "model": "/not/there"}, "/not/there"),
        ({"method": "draft_model", "model": str(DEMO_MODEL)}, "same vocabulary size"),
        ({"method": "eagle", "model": "/not/there"}, "/not/there"),
        ({"method": "mtp"}, "mtp"),
        ({**draft_model(), "quantization": 5}, "quantization"),
        ({**draft_model(), "draft_lm_head_quantization": "fp8"}, "draft_lm_head_quantization"),
        ({**draft_model(), "draft_tensor_parallel_size": 3}, "draft_tensor_parallel_size"),
        ({**draft_model(), "draft_tensor_parallel_size": "x"}, "draft_tensor_parallel_size"),
    ],
    ids=str,
)
def test_refused_with_a_sentence(stage: dict[str, Any], says: str) -> None:
    """What vLLM raises, in one sentence, before anything is loaded."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(
        model=str(checkpoint("llama")), skip_tokenizer_init=True, speculative_config=cascade(LOOKUP, stage)
    )
    with pytest.raises(ConfigError) as caught:
        args.create_engine_config()
    sentence = str(caught.value)
    assert says in sentence and sentence.startswith("cascade: ") and sentence.endswith(".")
    assert "\n" not in sentence and len(sentence) < 300
