"""The policies on arrays against the same policies written plainly, one request and one token at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplugins.cascade.drafters import Drafter, First, OptionFilter
from vllm_specplugins.cascade.staged import ModelDrafter, StagedDrafter
from vllm_specplugins.config import EarlyExitConfig
from vllm_specplugins.counters import StageCounters
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.structures.draft_arrays import DraftArrays, of_stage
from vllm_specplugins.target import Sampling, Target

VOCAB_SIZE, K = 9, 5
CONTEXT = ProposerContext(VOCAB_SIZE, 64, 8, K, lambda text: [])
Tokens = list[tuple[int, int, float]]  # token, stage, confidence


def looked_up(text: list[int], most: int, seed: int) -> tuple[list[int], int]:
    """A cheap stage's draft behind a text, and its confidence: anything that depends on the whole text alone."""
    rng = np.random.default_rng([seed, *text])
    count = min(most, int(rng.integers(0, K + 1)))
    return [next_token(text) if rng.random() < 0.5 else int(rng.integers(VOCAB_SIZE))][:count] + rng.integers(
        0, VOCAB_SIZE, max(0, count - 1)
    ).tolist(), int(rng.integers(1, 9))


def next_token(text: list[int]) -> int:
    """What the model stage says behind a text."""
    return (5 * text[-1] + 2) % VOCAB_SIZE


class Layers:
    """Those of which `next_token` is the argmax."""

    def hidden_states(self, end_layer: int, token_ids: torch.Tensor, positions: torch.Tensor, normed: bool) -> Any:
        return torch.nn.functional.one_hot((5 * token_ids.long() + 2) % VOCAB_SIZE, VOCAB_SIZE).float()

    def argmax(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.argmax(dim=-1)


@dataclass
class Cheap:
    index: int

    def draft(self, batch: DraftBatch, prefix: DraftArrays | None, max_draft: np.ndarray) -> DraftArrays:
        token_ids, sure = np.full((len(max_draft), K), 3, np.int32), np.zeros(len(max_draft))
        num_draft = np.zeros(len(max_draft), np.int64)
        for row, limit in enumerate(max_draft.tolist()):
            text = batch.token_ids[row].tolist()
            if prefix is not None:
                text += prefix.token_ids[row, : prefix.num_draft[row]].tolist()
            tokens, sure[row] = looked_up(text, limit, self.index)
            token_ids[row, : len(tokens)], num_draft[row] = tokens, len(tokens)
        return of_stage(self.index, token_ids, num_draft, sure)


def of_cheap(index: int) -> Callable[[list[int], int], Tokens]:
    def draft(text: list[int], most: int) -> Tokens:
        tokens, sure = looked_up(text, most, index)
        return [(token, index, sure + place) for place, token in enumerate(tokens)]

    return draft


def of_model(text: list[int], most: int) -> Tokens:
    tokens: Tokens = []
    for place in range(most):
        tokens.append((next_token([*text, *(token for token, _, _ in tokens)]), 2, 1.0 + place))
    return tokens


def expected(policy: str, longest: Sequence[int], allowed: list[bool], text: list[int], most: int) -> Tokens:
    """Stages 0 and 1 are cheap and 2 is the model; "verify" has 0 and 2."""
    stages = [of_cheap(0), of_cheap(1), of_model]
    if policy == "verify":
        index = 2 if allowed[2] else 0
        return stages[index](text, min(most, longest[index])) if allowed[index] else []
    tokens: Tokens = []
    for stage, is_allowed, own_most in zip(stages, allowed, longest, strict=True):
        if is_allowed and not tokens:
            tokens += stage(text + [token for token, _, _ in tokens], min(most - len(tokens), own_most))
    return tokens


def drafter_of(policy: str, longest: Sequence[int]) -> Drafter:
    stage = EarlyExit(EarlyExitConfig(exit_layer=1, draft_sample_method="greedy"), CONTEXT)
    first = OptionFilter(Cheap(0), None, "0", longest[0])
    if policy == "verify":
        return OptionFilter(StagedDrafter(first, stage, 2, StageCounters()), first, "2", longest[2])
    second = OptionFilter(Cheap(1), None, "1", longest[1])
    return First(First(first, second), OptionFilter(ModelDrafter(stage, 2, StageCounters()), None, "2", longest[2]))


@pytest.mark.parametrize("longest", [(K, K, K), (3, 1, 2)])
@pytest.mark.parametrize("policy", ["first", "verify"])
def test_policies(policy: str, longest: Sequence[int]) -> None:
    """Tokens, stages and confidences of 100 batches. Fails if a draft is continued from another place than its end, if
    a stage drafts more than its own most, or for a request that does not allow it, if a confidence does not grow along
    a stage's own tokens alone, or if ids are of a type that the barrier stops."""
    rng, drafter, num_tokens = np.random.default_rng(3), drafter_of(policy, longest), 0
    for _ in range(100):
        num_reqs = int(rng.integers(1, 7))
        texts = [rng.integers(0, VOCAB_SIZE, rng.integers(1, 9)).astype(np.int32) for _ in range(num_reqs)]
        allowed = rng.random((num_reqs, 3)) < (0.7 if rng.random() < 0.5 else 1.0)
        options = [
            {"stages": tuple(str(s) for s in range(3) if own[s])} if rng.random() < 0.8 else {} for own in allowed
        ]
        allowed |= [[not own] for own in options]
        lengths = torch.tensor([len(text) for text in texts])
        last = torch.tensor([int(text[-1]) for text in texts], dtype=torch.int32)
        sampling = Sampling(torch.zeros(num_reqs), torch.zeros(num_reqs, dtype=torch.int64))
        target = Target(Layers(), last, lengths, None, sampling)  # type: ignore[arg-type]
        max_draft = rng.integers(0, K + 1, num_reqs).astype(np.int32)
        batch = DraftBatch([str(row) for row in range(num_reqs)], texts, max_draft, options, target)
        drafts = drafter.draft(batch, None, max_draft)
        assert drafts.token_ids.dtype == np.int32
        for row, text in enumerate(texts):
            made = [
                part[row, : drafts.num_draft[row]].tolist()
                for part in (drafts.token_ids, drafts.stage, drafts.confidence)
            ]
            assert list(zip(*made, strict=True)) == expected(
                policy, longest, allowed[row].tolist(), text.tolist(), int(max_draft[row])
            )
            num_tokens += len(made[0])
    assert num_tokens > 200


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
        found, found_t = first.followed_by(second), first_t.followed_by(second_t)
        for part, part_t in zip(found[:5], found_t[:5], strict=True):
            assert (
                part is part_t is None
                or part[found.is_drafted if part.ndim == 2 else ...].tolist()
                == part_t.numpy()[found.is_drafted if part.ndim == 2 else ...].tolist()
            )
