"""Drafts of a lookup and an exit made on tensors against those of the cascade on the host, over recorded texts."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prompts import edit_answer, load_prompts
from transformers import AutoTokenizer
from vllm_specplugins.kernels.acceptance.reference import best_length
from vllm_specplugins.kernels.history_match import NO_MATCH, References, Texts, history_match

from vllm_specplugins.cascade.on_device import LOOKUP, DeviceBatch, DeviceModel
from vllm_specplugins.cascade.verify import CheckedOnDevice
from vllm_specplugins.draft import Draft, DraftBatch, ProposerContext
from vllm_specplugins.methods import build_proposer
from vllm_specplugins.parsing import parse_config
from vllm_specplugins.structures.drafts import DraftArrays, join, of_stage, put_logits
from vllm_specplugins.target import Sampling, Target

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
NUM_STEPS = 10_000 if os.environ.get("SPECPLUGINS_FUZZ") else 800  # of a request
VOCAB_SIZE, K, NUM_ROWS, LONGEST = 4096, 5, 8, 256
CONTEXT = ProposerContext(VOCAB_SIZE, LONGEST, NUM_ROWS, K, lambda text: [])


def after(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the exit says: what stands next in text 0 at first, and then anything that depends on both."""
    return torch.where(positions % 7 < 4, token_ids.long() + 1, 5 * token_ids.long() + positions) % VOCAB_SIZE


class Layers:
    """Those of which `after` is the argmax."""

    def hidden_states(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool) -> Any:
        return torch.nn.functional.one_hot(after(token_ids, positions), VOCAB_SIZE).float()

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.argmax(dim=-1)


def batches() -> Iterator[DraftBatch]:
    """Prompts and edits of them, as they go on by some tokens a step; some requests do not allow a stage, and some have
    a reference, which ends soon after their own text as it is at first."""
    tokenizer, rng = AutoTokenizer.from_pretrained(str(MODEL)), np.random.default_rng(2)
    prompts = load_prompts("edit", 12)
    texts = [np.array(tokenizer.encode(text + edit_answer(text))[-LONGEST:], np.int32) for text in prompts]
    texts += [np.arange(LONGEST, dtype=np.int32) % 11, *(rng.permutation(LONGEST).astype(np.int32) for _ in range(9))]
    live: dict[str, tuple[np.ndarray, int, Any]] = {}
    for step in range(NUM_STEPS // NUM_ROWS):
        while len(live) < NUM_ROWS:
            text = texts[rng.integers(len(texts))]
            length = int(rng.integers(2, len(text)))
            reference = text[max(0, length - 30) : length + K].tolist()
            own = {"reference": reference} if rng.random() < 0.5 else {}
            own |= [{}, {}, {"stages": ("prompt_lookup",)}, {"stages": ("early_exit",)}][rng.integers(4)]
            live[f"{step}-{len(live)}"] = text, length, own
        lengths = np.array([length for _, length, _ in live.values()])
        last = [int(text[length - 1]) for text, length, _ in live.values()]
        sampling = Sampling(torch.zeros(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64))
        target = Target(Layers(), torch.tensor(last), torch.tensor(lengths), None, sampling)  # type: ignore[arg-type]
        histories = [text[:length] for text, length, _ in live.values()]
        max_draft = rng.integers(0, K + 1, NUM_ROWS).astype(np.int32)
        yield DraftBatch(list(live), histories, max_draft, [own for *_, own in live.values()], target)
        live = {
            name: (text, length + int(rng.integers(1, K + 2)), own)
            for name, (text, length, own) in live.items()
            if length + K + 1 < len(text) and rng.random() < 0.7
        }


def looked_up(batch: DraftBatch, max_draft: torch.Tensor, distances: dict[str, torch.Tensor]) -> Any:
    """By the device's operation, in its reference."""
    token_ids = torch.zeros(batch.num_reqs, LONGEST, dtype=torch.int32)
    for row, history in enumerate(batch.token_ids):
        token_ids[row, : len(history)] = torch.from_numpy(history)
    lengths = torch.tensor([len(history) for history in batch.token_ids], dtype=torch.int32)
    pool, sizes = torch.zeros_like(token_ids), torch.zeros_like(lengths)
    for row, own in enumerate(batch.options):
        reference = torch.tensor(own.get("reference", ()), dtype=torch.int32)
        pool[row, : len(reference)], sizes[row] = reference, len(reference)
    rows = torch.arange(batch.num_reqs)
    references = References(pool.view(-1), rows * LONGEST, sizes)
    kept = torch.stack([distances.get(name, torch.tensor([NO_MATCH] * 2)) for name in batch.request_ids]).int()
    match = history_match(Texts(token_ids, lengths, kept), rows, max_draft, K, 2, 5, references)
    distances.update(zip(batch.request_ids, kept, strict=True))
    return of_stage(LOOKUP, *match)


def on_host(policy: str, most: Sequence[int]) -> Any:
    stages = [
        {"method": "prompt_lookup", "min_ngram": 2, "max_ngram": 5, "num_speculative_tokens": most[0]},
        {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": most[1]},
    ]
    config = {"method": "cascade", "gate": "off", "stages": stages, "num_speculative_tokens": K}
    cascade: Any = build_proposer(
        parse_config({**config, "policy": "verify" if policy == "verify" else "auto"}), CONTEXT
    )
    if policy == "auto":
        cascade._first_draft = partial(behind, *cascade.stages)
    return cascade


def behind(first: Any, second: Any, batch: DraftBatch) -> DraftArrays:
    """The second stage continues where the first one ends."""
    max_draft = batch.max_num_draft.astype(np.int64)
    drafts: DraftArrays = first.draft(batch, None, first.limits(batch, max_draft))
    return join(drafts, second.draft(batch, drafts, second.limits(batch, max_draft - drafts.num_draft)))


@pytest.mark.parametrize(
    ("policy", "rates", "most"), [("first", False, (4, 2)), ("verify", True, (K, K)), ("auto", True, (2, 3))]
)
def test_drafts_of_the_host(policy: str, rates: bool, most: tuple[int, int]) -> None:
    """Token for token, and each of the same stage. Fails if a request's draft is that of a stage that it does not
    allow, or longer than that stage's own most, if the exit does not follow the lookup's tokens under `auto`, or
    follows them under `verify`, or if it takes more steps under `auto` than a draft of its own has tokens."""
    cascade = on_host(policy, most)
    proposer = cascade.stages[1].proposer
    proposer.continues_drafts = policy == "auto"
    tracker = SimpleNamespace(worth=lambda drafts, *_, **__: SimpleNamespace(num_kept=drafts.num_draft))
    source = CheckedOnDevice(proposer) if policy == "verify" else DeviceModel(proposer, tracker)
    stages, num_mixed, distances = [0, 0], 0, {}
    for batch in batches():
        expected: Draft = cascade.propose(batch)
        allowed = torch.tensor(
            [[name in own.get("stages", (name,)) for name in ("prompt_lookup", "early_exit")] for own in batch.options]
        )
        max_draft = torch.from_numpy(batch.max_num_draft)
        own = (max_draft * allowed[:, 1]).clamp(max=most[1])
        found = looked_up(batch, (max_draft * allowed[:, 0]).clamp(max=most[0]), distances)
        drafts = source.draft(DeviceBatch(own, most[1], batch.target, rates=rates), found, own)
        lengths = expected.num_draft
        if policy == "auto":  # it begins when the lookup does
            lengths = np.minimum(lengths, np.maximum(found.num_draft.numpy(), own.numpy()))
        assert drafts.num_draft.tolist() == lengths.tolist()
        for row, length in enumerate(lengths):
            assert drafts.token_ids[row, :length].tolist() == expected.token_ids[row, :length].tolist()
        for stage in (0, 1):
            stages[stage] += int(((drafts.stage == stage) & drafts.is_drafted).sum())
        num_mixed += int((drafts.stage.diff(dim=1) * drafts.is_drafted[:, 1:]).any(dim=1).sum())
        assert policy != "verify" or (drafts.by_stage[2] <= drafts.by_stage[0]).all()
    kept = [counters.kept for counters in cascade.stage_counters().values()][1]
    assert kept >= stages[1] > NUM_STEPS // 8 and (policy == "auto" or kept == stages[1])
    assert policy == "verify" or stages[0] > NUM_STEPS // 4
    assert policy != "auto" or num_mixed > NUM_STEPS // 100


@pytest.mark.parametrize("num_steps", [0, 2, 3])
def test_what_is_kept(num_steps: int) -> None:
    """Rows of others stay. Fails if a certain token, or what stands after the exit's last step, is not one-hot, if one
    that was drawn loses its own, or if a request's logits are kept as another's."""
    rng, rows, token_ids = np.random.default_rng(1), torch.tensor([3, 0]), torch.tensor([[1, 2, 3], [4, 0, 2]])
    is_certain = torch.from_numpy(rng.random((2, 3)) < 0.5)
    logits, kept = torch.randn(2, num_steps, 9), torch.full((4, 3, 9), torch.nan)
    put_logits(kept, rows, token_ids.int(), logits.clone() if num_steps else None, is_certain)
    one_hot = torch.nn.functional.one_hot(token_ids, 9).double().log().float()
    drawn = torch.where(is_certain[:, :num_steps, None], one_hot[:, :num_steps], logits)
    assert torch.equal(kept[rows], torch.cat((drawn, one_hot[:, num_steps:]), dim=1))
    assert kept[[1, 2]].isnan().all()


def test_what_a_match_is_worth() -> None:
    """As most tokens are expected, counted one by one. Fails if the exit goes on behind its depth."""
    rng, depths = np.random.default_rng(3), set()
    for depth in range(K + 1):
        survival, rates = rng.random((50, K)).cumprod(axis=1), rng.random(50)
        lengths = rng.integers(0, K + 1, 50)
        survival *= np.arange(K) < lengths[:, None]
        tensors = (torch.from_numpy(array) for array in (survival, rates[:, None], lengths))
        found = best_length(*tensors, depth).tolist()
        for row, kept in enumerate(found):
            worth = {}
            for end in range(lengths[row] + 1):
                alive = survival[row, end - 1] if end else 1.0
                worth[end] = survival[row, :end].sum()
                worth[end] += sum(alive * rates[row] ** more for more in range(1, depth - end + 1))
            assert worth[kept] == pytest.approx(max(worth.values()), abs=1e-4)
        depths.add(sum(found) < lengths.sum())
    assert depths == {False, True}
