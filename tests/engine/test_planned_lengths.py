"""Asynchronous scheduling plans drafts before they exist: what is verified behind a draft's end must cost nothing."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RUNNER
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample

from vllm_specplugins.draft import Draft

pytestmark = pytest.mark.skipif(RUNNER != "v2", reason="V1 plans behind the drafts")
K = 3


def keep(draft: Draft, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where verification finds a draft: tokens [num_reqs, K] and logits [max_num_reqs, K, vocab_size]."""
    from vllm_specplugins.engine.v2.speculators.host import HostSpeculator

    num_reqs = len(draft.num_draft)
    kept = torch.full((num_reqs + 1, K, vocab_size), 7.0)  # of an earlier step
    speculator: Any = SimpleNamespace(
        draft_tokens=torch.zeros(num_reqs, K, dtype=torch.int64),
        draft_logits=kept[:num_reqs],
        _draft_logits=kept,
        idx_mapping=torch.arange(num_reqs).flip(0),
        tally=SimpleNamespace(add_q=lambda *args: None),
        num_speculative_steps=K,
        device=torch.device("cpu"),
    )
    HostSpeculator._keep(speculator, draft)
    return speculator.draft_tokens, speculator.draft_logits


@pytest.mark.parametrize("width", [0, 2, K])
def test_behind_a_drafts_end(width: int) -> None:
    """Every row verified with K drafts, whatever its length: the first token that no draft decides is distributed as p.
    Kills: logits of nobody's, zeros as a cascade pads with, behind a row's end (token 0 then comes out far too often).
    """
    num_reqs, vocab_size = 30_000, 4
    lengths = np.arange(num_reqs, dtype=np.int32) % (width + 1)
    token_ids = np.zeros((num_reqs, width), np.int32)
    logits = torch.zeros(num_reqs, width, vocab_size) if width else None
    tokens, kept = keep(Draft(token_ids, lengths, logits=logits), vocab_size)
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    num_logits = num_reqs * (K + 1)
    for row in (0, 1, 2):
        certain = kept[num_reqs - 1 - row, lengths[row] :]
        assert torch.equal(certain.softmax(-1).argmax(-1), tokens[row, lengths[row] :])
        assert certain.softmax(-1).amax(-1).eq(1).all()
    none = lengths == 0  # their first token is decided behind the draft's end
    sampled, _ = rejection_sample(
        probs.log().expand(num_logits, -1).contiguous(),
        torch.arange(num_reqs + 1, dtype=torch.int32) * (K + 1),
        torch.nn.functional.pad(tokens, (1, 0)).view(-1).int(),
        torch.arange(K + 1).repeat(num_reqs) + 5,
        torch.arange(num_reqs).flip(0).int(),
        Sampling(torch.ones(num_reqs), torch.arange(num_reqs) * 7919),
        K,
        kept,
    )
    found = np.bincount(sampled[torch.from_numpy(none), 0].numpy(), minlength=vocab_size) / none.sum()
    assert np.abs(found - probs.numpy()).max() < 0.02
