"""Acceptance probabilities: predicted against observed, on made-up texts."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from vllm_specplugins.kernels.acceptance import Drafts, observe, predict
from vllm_specplugins.kernels.acceptance.reference import new_state

from vllm_specplugins.structures.drafts import DraftArrays, of_stage

K, NUM_ROWS = 6, 8
RELIABILITY = 0.05
Step = tuple[np.ndarray, DraftArrays, np.ndarray, np.ndarray]  # rows, drafts, tokens verified, tokens accepted


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
        observe(state, slots, *fates)
        places = np.arange(K)
        tried = (places < verified[:, None]) & (places <= accepted[:, None])
        found.append(np.stack((accept_probs, places < accepted[:, None] + 0 * accept_probs, drafts.stage))[:, tried])
    return tuple(np.concatenate(found, axis=1))  # type: ignore[return-value]


@pytest.mark.parametrize("seed", [1, 2])
def test_stages_are_learned_apart(seed: int) -> None:
    """On average each has its own rate. Fails if one model serves both, or if tokens after a rejected one count."""
    accept_probs, is_right, stage = judged(made_up(seed))
    for index in (0, 1):
        is_own = stage == index
        assert abs(accept_probs[is_own].mean() - is_right[is_own].mean()) < RELIABILITY
