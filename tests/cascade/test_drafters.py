"""Cascades on the host: staged verification yields the tokens of the last stage for any drafts that it checks."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugins.cascade.cascade import Cascade
from vllm_specplugins.cascade.stage import Stage
from vllm_specplugins.cascade.verify import Checked
from vllm_specplugins.config import CascadeConfig, EarlyExitConfig, StageConfig
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, Feedback, ProposerContext
from vllm_specplugins.isolation.barrier import FaultBarrier
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.drafts import DraftArrays, dense_logits, join, of_stage
from vllm_specplugins.target import Sampling, Target

VOCAB_SIZE, K = 7, 6
CONTEXT = ProposerContext(VOCAB_SIZE, 64, 8, K, lambda text: [])


class FakeForward:
    """Layers whose logits depend on all tokens so far. A KV cache that must never be read where nothing was written."""

    def __init__(self, histories: Sequence[np.ndarray], sharpness: dict[int, float]):
        self.histories, self.sharpness = histories, sharpness
        self.cache = [dict(enumerate(history[:-1].tolist())) for history in histories]
        self.num_passes = 0

    def hidden_states(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool) -> Any:
        self.num_passes += 1
        shape = token_ids.shape
        states = []
        for row, (tokens, places) in enumerate(
            zip(token_ids.view(shape[0], -1), positions.view(shape[0], -1), strict=True)
        ):
            for token, place in zip(tokens.tolist(), places.tolist(), strict=True):
                assert place < len(self.histories[row]) - 1 + K, "a slot that is not reserved"
                self.cache[row][place] = token
            for place in places.tolist():
                text = tuple(self.cache[row][i] for i in range(place + 1))
                noise = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(hash(text) % 2**60))
                exit_noise = torch.randn(
                    VOCAB_SIZE, generator=torch.Generator().manual_seed(hash((end_layer, text)) % 2**60)
                )
                states.append(noise * 2 + exit_noise * self.sharpness[end_layer])
        return torch.stack(states).view(*shape, -1)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.argmax(dim=-1)


def drafted(rows: Sequence[Sequence[int]], stage: int = 0) -> DraftArrays:
    """Drafts of these tokens. What stands behind a draft's end is a token that nobody may go by."""
    token_ids = np.full((len(rows), K), VOCAB_SIZE - 1, np.int32)
    for row, tokens in enumerate(rows):
        token_ids[row, : len(tokens)] = tokens
    return of_stage(stage, token_ids, np.array([len(tokens) for tokens in rows]), np.full(len(rows), 2.0))


class Cheap:
    """A source without limits."""

    def __init__(self) -> None:
        self.counters = StageCounters()

    def limits(self, batch: DraftBatch, max_tokens: np.ndarray) -> np.ndarray:
        return max_tokens


class Nothing(Cheap):
    """Offers nothing."""

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: np.ndarray) -> DraftArrays:
        return drafted([()] * len(max_draft))


class Offers(Cheap):
    """A cheap drafter: random lengths, and each token right with some probability (if `right` is given)."""

    def __init__(self, rng: np.random.Generator, right: list[list[int]] | None = None):
        super().__init__()
        self.rng, self.right = rng, right

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: np.ndarray) -> DraftArrays:
        rows = []
        for row, limit in enumerate(max_draft.tolist()):
            length = int(self.rng.integers(0, limit + 1))
            offered = [int(token) for token in self.rng.integers(0, VOCAB_SIZE, length)]
            if self.right is not None:
                start = 0 if prefix is None else int(prefix.num_draft[row])
                known = self.right[row][start : start + length]
                offered = [a if self.rng.random() < 0.8 else b for a, b in zip(known, offered, strict=False)]
            rows.append(offered)
        return drafted(rows)


def penalize(
    logits: torch.Tensor, drafts: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor | None
) -> torch.Tensor:
    """As a request's parameters do: by the drafts before, and where the row stands."""
    edited = logits.clone()
    for row, (tokens, place) in enumerate(zip(drafts.tolist(), positions.tolist(), strict=True)):
        edited[row, place % VOCAB_SIZE] += 2
        for token in tokens if counts is None else tokens[: counts[row]]:
            edited[row, token] -= 3
    return edited


def make_batch(rng: np.random.Generator, num_reqs: int, edits: bool = False) -> DraftBatch:
    histories = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 12)).astype(np.int32) for _ in range(num_reqs)]
    target = Target(
        forward=FakeForward(histories, {1: 1.5, 2: 0.7}),
        last_token_ids=torch.tensor([int(history[-1]) for history in histories], dtype=torch.int32),
        num_tokens=torch.tensor([len(history) for history in histories]),
        last_hidden_states=None,
        sampling=Sampling(torch.tensor(rng.choice([0.0, 0.7, 1.3], num_reqs)).float(), torch.arange(num_reqs) * 99),
        edit=penalize if edits else None,
    )
    max_draft = rng.integers(0, K + 1, num_reqs).astype(np.int32)
    return DraftBatch([str(i) for i in range(num_reqs)], histories, max_draft, [{}] * num_reqs, target)


def exit_stage(layer: int, method: str) -> EarlyExit:
    return EarlyExit(EarlyExitConfig(exit_layer=layer, draft_sample_method=method), CONTEXT)


def ids(drafts: DraftArrays) -> list[list[int]]:
    return [tokens[:count].tolist() for tokens, count in zip(drafts.token_ids, drafts.num_draft, strict=True)]


def stage_of(proposer: EarlyExit, index: int = 1) -> Stage:
    return Stage(
        index, StageConfig(method="early_exit", method_config=EarlyExitConfig()), "early_exit", proposer, CONTEXT, None
    )


def checked(cheap: Any, proposer: EarlyExit, index: int = 1) -> Checked:
    return Checked(cheap, stage_of(proposer, index))


def continued(proposer: EarlyExit, batch: DraftBatch, prefix: DraftArrays, max_draft: np.ndarray) -> DraftArrays:
    return stage_of(proposer).draft(batch, prefix, max_draft)


def alone(batch: DraftBatch, stage: EarlyExit) -> tuple[list[list[int]], Any]:
    """What the stage drafts by itself, token by token."""
    draft = stage.propose(batch)
    tokens = [row[:count].tolist() for row, count in zip(draft.token_ids, draft.num_draft, strict=True)]
    return tokens, draft.logits


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_verified_tokens_are_the_stages_own(method: str, edits: bool, seed: int) -> None:
    """Draft by draft, for ragged batches, and with q. Kills: an off-by-one in columns or positions, a token kept
    unseen, noise of another position, a slot that is not reserved, a pass that spoils the KV of a row that is done, a
    penalty that does not know the drafts before.
    """
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, int(rng.integers(1, 6)), edits)
    stage = exit_stage(2, method)
    expected, logits = alone(batch, stage)
    verified = [
        checked(cheap, stage).draft(batch, None, batch.max_num_draft)
        for cheap in (Nothing(), Offers(rng), Offers(rng, expected))
    ]
    for drafts in (*verified, continued(stage, batch, drafted([()] * batch.num_reqs), batch.max_num_draft)):
        assert ids(drafts) == expected
        q = dense_logits(drafts, K)
        assert (q is None) == (method == "greedy" or not any(expected))
        for row, tokens in enumerate(expected):
            assert (drafts.stage[row] == 1).all() and drafts.confidence[row].tolist() == list(range(1, K + 1))
            if q is not None:
                assert torch.equal(q[row, : len(tokens)], logits[row, : len(tokens)])


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("edits", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_an_exit_goes_on_with_a_draft(method: str, edits: bool, seed: int) -> None:
    """Behind its own first tokens it says what it says alone, for ragged batches. Kills: a place that is off by one; a
    penalty that does not know the draft that was begun, or what the exit went on with."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, int(rng.integers(1, 6)), edits)
    stage = exit_stage(2, method)
    expected, _ = alone(batch, stage)
    prefix = [tokens[: int(rng.integers(0, len(tokens) + 1))] for tokens in expected]
    rest = [tokens[len(first) :] for tokens, first in zip(expected, prefix, strict=True)]
    max_draft = np.array([len(tokens) for tokens in rest])
    assert ids(continued(stage, batch, drafted(prefix), max_draft)) == rest


@pytest.mark.parametrize("seed", range(10))
def test_three_stages(seed: int) -> None:
    """A verified cascade as the cheap drafter of another: still the last stage's tokens."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, 4)
    first, last = exit_stage(1, "probabilistic"), exit_stage(2, "probabilistic")
    expected, _ = alone(batch, last)
    nested = checked(checked(Offers(rng), first), last, 2)
    assert ids(nested.draft(batch, None, batch.max_num_draft)) == expected


def test_good_offers_save_passes() -> None:
    """One pass for a whole draft that is right. Kills: checking token by token."""
    rng = np.random.default_rng(0)
    batch = make_batch(rng, 1)
    batch = DraftBatch(batch.request_ids, batch.token_ids, np.array([K], np.int32), batch.options, batch.target)
    stage = exit_stage(2, "greedy")
    expected, _ = alone(batch, stage)

    class Right(Cheap):
        def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: np.ndarray) -> DraftArrays:
            return drafted([expected[0][: max_draft[0]]])

    before = batch.target.forward.num_passes
    source = checked(cheap := Right(), stage)
    drafts = source.draft(batch, None, np.array([K]))
    assert ids(drafts) == expected and batch.target.forward.num_passes == before + 1
    assert (source.counters.drafted, cheap.counters.kept) == (K, K - 1)


@pytest.mark.parametrize("seed", range(10))
def test_behind_drafts_and_in_their_stead(seed: int) -> None:
    """Kills: a model stage that continues from another place than the end of what was begun."""
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, 4)
    stage = exit_stage(2, "greedy")
    max_draft = batch.max_num_draft
    fixed_offers = Offers(rng).draft(batch, None, max_draft)
    offers = ids(fixed_offers)
    rest = continued(stage, batch, fixed_offers, max_draft - fixed_offers.num_draft)
    extended = ids(join(fixed_offers, rest))
    for row, offer in enumerate(offers):
        assert extended[row][: len(offer)] == offer
        assert len(extended[row]) == max_draft[row]
        text = list(batch.token_ids[row]) + extended[row]
        forward = FakeForward([np.array(text[: len(batch.token_ids[row])])], {2: 0.7})
        for place in range(len(batch.token_ids[row]) + len(offer), len(text)):
            forward.cache[0] = dict(enumerate(map(int, text[: place - 1])))
            state = forward.hidden_states(2, torch.tensor([int(text[place - 1])]), torch.tensor([place - 1]), True)
            assert int(state.argmax()) == text[place]


def cascade(policy: str, gate: str = "off") -> Cascade:
    config = parse_config(
        {"method": "cascade", "policy": policy, "gate": gate, "num_speculative_tokens": CONTEXT.max_num_draft,
         "stages": [{"method": "prompt_lookup", "min_ngram": 1}, {"method": "early_exit", "exit_layer": 2}]}
    )  # fmt: skip
    proposer = build_proposer(config, CONTEXT)
    assert isinstance(proposer, Cascade)
    return proposer


@pytest.mark.parametrize("policy", ["verify", "auto"])
def test_cascade(policy: str) -> None:
    """The whole proposer: shapes, accounts, and nothing kept of a request that is gone."""
    rng = np.random.default_rng(5)
    proposer = cascade(policy)
    batch = make_batch(rng, 5)
    draft = proposer.propose(batch)
    assert (draft.num_draft <= batch.max_num_draft).all() and draft.token_ids.shape[0] == 5
    if policy == "verify":
        expected, _ = alone(batch, exit_stage(2, "greedy"))
        assert [row[:n].tolist() for row, n in zip(draft.token_ids, draft.num_draft, strict=True)] == expected
    accepted = np.minimum(draft.num_draft, 1)
    proposer.observe(Feedback(batch.request_ids, draft.num_draft, accepted))
    counters = proposer.stage_counters()
    assert list(counters) == ["0 prompt_lookup", "1 early_exit"]
    assert sum(stage.accepted for stage in counters.values()) == accepted.sum()
    assert sum(stage.kept for stage in counters.values()) >= draft.num_draft.sum()
    proposer.propose(batch)
    proposer.forget(batch.request_ids)
    assert not proposer._rows.known(batch.request_ids).any()
    proposer.propose(replace(make_batch(rng, 1), request_ids=["new"], max_num_draft=np.array([3], np.int32)))
    assert list(proposer.stages[0].proposer._rows._rows) == ["new"], "a stage forgets before it next drafts"


def test_config_is_nested() -> None:
    config = parse_config({"method": "cascade", "stages": [{"method": "prompt_lookup"}, {"method": "early_exit"}]})
    assert isinstance(config.method_config, CascadeConfig)
    assert config.method_config.stages[1] == StageConfig(
        method="early_exit", method_config=EarlyExitConfig(), num_speculative_tokens=5
    )
    assert (config.method_config.policy, config.common.gate) == ("auto", "auto")


def test_ranks_agree_on_times() -> None:
    """The gate gets the agreed times, with one exchange per step. Fails if a gate uses the clock of its rank."""
    exchanged: list[list[float]] = []

    def agreed(times: Any) -> Any:
        if isinstance(times, DraftArrays):  # a stage's
            return times
        exchanged.append(times)
        return [1000 + index for index in range(len(times))]

    stages = [{"method": "prompt_lookup", "min_ngram": 1}, {"method": "early_exit", "exit_layer": 2}]
    config = parse_config({"method": "cascade", "stages": stages})
    proposer = build_proposer(config, replace(CONTEXT, agreed=agreed))
    assert isinstance(proposer, Cascade) and proposer._gate is not None
    batch = make_batch(np.random.default_rng(1), 3)
    for _ in range(3):
        draft = proposer.propose(batch)
        proposer.observe(Feedback(batch.request_ids, draft.num_draft, draft.num_draft, step_ms=5.0))
    assert len(exchanged) == 3 and all(len(times) == 5 for times in exchanged)
    [costs] = proposer._gate._costs.by_load.values()
    assert costs.mean_ms == 1000.0 and costs.mean_drafting_ms == 1001.0


def test_log_line() -> None:
    """What a cascade did so far, by stage."""
    proposer = cascade("verify")
    batch = make_batch(np.random.default_rng(5), 5)
    draft = proposer.propose(batch)
    feedback = Feedback(batch.request_ids, draft.num_draft, np.minimum(draft.num_draft, 1))
    proposer.observe(feedback)
    barrier = FaultBarrier(proposer, VOCAB_SIZE, K, None)
    barrier.counters.add(feedback)
    words = barrier.totals().summary()
    assert f"drafted {draft.num_draft.sum()}, accepted {np.minimum(draft.num_draft, 1).sum()}; " in words
    assert re.search(r"stage 0 prompt_lookup: drafted \d+, kept \d+, accepted \d+, \d+ ms; stage 1 early_exit: ", words)


def test_same_arithmetic_on_tensors() -> None:
    """Joining and choosing drafts gives the same on NumPy's arrays and torch's. Fails if an operation is one side's."""
    rng = np.random.default_rng(4)

    def both(drafts: DraftArrays) -> tuple[DraftArrays, DraftArrays]:
        parts = [None if part is None else torch.from_numpy(part) for part in drafts[:5]]
        return drafts, DraftArrays(*parts, drafts.logits)

    for _ in range(50):
        num_reqs = int(rng.integers(1, 5))
        made = []
        for stage in (0, 1):
            token_ids = rng.integers(0, VOCAB_SIZE, (num_reqs, K)).astype(np.int32)
            q, logits = None, None
            if rng.random() < 0.5:
                q, logits = rng.integers(-1, 3, (num_reqs, K)), torch.randn(3, VOCAB_SIZE)
            made.append(of_stage(stage, token_ids, rng.integers(0, 3, num_reqs), np.ones(num_reqs), q, logits))
        (first, first_t), (second, second_t) = map(both, made)
        joined, joined_t = join(first, second), join(first_t, second_t)
        for part, part_t in zip(joined[:5], joined_t[:5], strict=True):
            assert (
                part is part_t is None
                or part[joined.is_drafted if part.ndim == 2 else ...].tolist()
                == part_t.numpy()[joined.is_drafted if part.ndim == 2 else ...].tolist()
            )
