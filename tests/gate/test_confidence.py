"""Acceptance probabilities: predicted against observed, on recorded texts and made-up ones."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prompts import edit_answer, load_prompts
from transformers import AutoTokenizer
from vllm_specplugins.kernels.acceptance import Drafts, learn, predict
from vllm_specplugins.kernels.acceptance.state import new_state

from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.structures.draft_arrays import DraftArrays, of_stage

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo" / "model"
K, NUM_ROWS = 6, 8
RELIABILITY = 0.05
Step = tuple[np.ndarray, DraftArrays, np.ndarray, np.ndarray]  # rows, drafts, tokens verified, tokens accepted


def recorded() -> Iterator[Step]:
    """What lookup drafts for held-out code as it goes on, and for edits of such code; eight texts at a time."""
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    texts = []
    for prompt in load_prompts("continue", 12):
        tokens = tokenizer.encode(prompt)[:500]
        texts.append((tokens, len(tokens) // 3))
    for prompt in load_prompts("edit", 12):
        tokens = tokenizer.encode(prompt)
        texts.append((tokens + tokenizer.encode(edit_answer(prompt)), len(tokens)))
    lookup = build_proposer(
        parse_config({"method": "prompt_lookup", "min_ngram": 1}),
        ProposerContext(1 << 16, 1 << 16, NUM_ROWS, K, lambda text: []),
    )
    waiting = [texts[index] for index in np.random.default_rng(0).permutation(len(texts))]
    live: dict[int, tuple[np.ndarray, int]] = {}
    while waiting or live:
        for row in set(range(NUM_ROWS)) - set(live):
            if waiting:
                tokens, start = waiting.pop()
                live[row] = np.array(tokens[:900], np.int32), start
        ids = [str(row) for row in live]
        known = [text[:length] for text, length in live.values()]
        draft = lookup.propose(DraftBatch(ids, known, np.full(len(ids), K, np.int32), [{}] * len(ids)))
        right = np.zeros(len(ids), np.int64)
        for index, (row, (text, length)) in enumerate(list(live.items())):
            follows = text[length : length + int(draft.num_draft[index])]
            wrong = np.flatnonzero(follows != draft.token_ids[index, : len(follows)])
            right[index] = wrong[0] if len(wrong) else len(follows)
            live[row] = text, length + int(right[index]) + 1
        drafts = of_stage(0, draft.token_ids, draft.num_draft, draft.confidence)
        yield np.array([int(name) for name in ids]), drafts, draft.num_draft, right
        over = [row for row, (text, length) in live.items() if length >= len(text) - 1]
        lookup.forget([str(row) for row in over])
        for row in over:
            del live[row]


def made_up(seed: int) -> Iterator[Step]:
    """Two stages: one whose matches mean less than they seem, one that gets worse along a draft. Texts change."""
    rng = np.random.default_rng(seed)
    for step in range(400):
        rows = np.sort(rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)])
        stage = rng.integers(0, 2, len(rows))
        sure = np.where(stage == 0, rng.integers(1, 12, len(rows)), 1).astype(float)
        token_ids = np.zeros((len(rows), K), np.int32)
        drafts = of_stage(0, token_ids, rng.integers(0, K + 1, len(rows)), sure)._replace(
            stage=np.repeat(stage[:, None], K, axis=1)
        )
        easy = 0.25 * ((rows + step // 100) % 2)[:, None]
        accept_probs = np.where(stage[:, None] == 0, 0.3 + easy, 0.7 + easy - 0.1 * np.arange(K))
        right = np.cumprod(rng.random((len(rows), K)) < accept_probs, axis=1).sum(axis=1)
        verified = np.minimum(drafts.num_draft, rng.integers(0, K + 1, len(rows)))
        yield rows, drafts, verified, np.minimum(right, verified)


def known(step: Step) -> tuple[torch.Tensor, Drafts, torch.Tensor, torch.Tensor]:
    """As a runner tells it: slots, drafts, tokens sampled, tokens rejected."""
    rows, drafts, verified, accepted = step
    parts = [torch.from_numpy(np.asarray(part)) for part in (drafts.num_draft, drafts.stage, drafts.confidence)]
    fates = (torch.from_numpy(part.astype(np.int32)) for part in (accepted + 1, verified - accepted))
    return torch.from_numpy(rows), Drafts(*parts), *fates


def judged(steps: Iterator[Step]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token that was tried: its probability as predicted, whether it was right, its stage."""
    state = new_state(2, NUM_ROWS, K, "cpu")
    found: list[np.ndarray] = []
    for step in steps:
        _, drafts, verified, accepted = step
        slots, own, *fates = known(step)
        predicted = torch.empty(own.stage.shape, dtype=torch.float64)
        predict(state, slots, own, predicted)
        accept_probs = predicted.numpy()
        assert (accept_probs[~drafts.is_drafted] == 0).all() and (accept_probs[drafts.is_drafted] > 0).all()
        learn(state, slots, *fates)
        places = np.arange(K)
        tried = (places < verified[:, None]) & (places <= accepted[:, None])
        found.append(np.stack((accept_probs, places < accepted[:, None] + 0 * accept_probs, drafts.stage))[:, tried])
    return tuple(np.concatenate(found, axis=1))  # type: ignore[return-value]


def unreliability(accept_probs: np.ndarray, is_right: np.ndarray) -> float:
    """How far, on average, tokens of about the same predicted probability are from it; in ten bins."""
    bins = np.minimum(accept_probs * 10, 9).astype(int)
    sums = [np.bincount(bins, weights, 10) for weights in (accept_probs, is_right)]
    return float(np.abs(sums[0] - sums[1]).sum() / len(accept_probs))


def test_recorded_texts() -> None:
    """Fails if tokens after a rejected one count as tried, or if certain tokens are not told from others."""
    accept_probs, is_right, _ = judged(recorded())
    assert len(accept_probs) > 3000
    assert unreliability(accept_probs, is_right) < RELIABILITY
    surest, others = is_right[accept_probs > 0.9].mean(), is_right[accept_probs < 0.5].mean()
    assert surest > 0.9 and others < 0.5


@pytest.mark.parametrize("seed", [1, 2])
def test_stages_are_learned_apart(seed: int) -> None:
    """On average each has its own rate. Fails if one model serves both, or if tokens after a rejected one count."""
    accept_probs, is_right, stage = judged(made_up(seed))
    for index in (0, 1):
        is_own = stage == index
        assert abs(accept_probs[is_own].mean() - is_right[is_own].mean()) < RELIABILITY
