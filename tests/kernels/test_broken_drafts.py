"""Draft logits that are no distribution, or hardly one: what is emitted follows p, in every implementation."""

import math

import pytest
import torch
from batches import p_value
from interpreted import assert_equals_reference, by_reference, needs_triton
from vllm_specplugins.kernels.rejection import rejection_sample
from vllm_specplugins.kernels.rejection.inputs import Batch, make_batch

SIZE, NUM_REQS = 8, 20_000
P = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.3, 0.1, -2.0])
NAN, INF = math.nan, math.inf
BROKEN = {
    "NaN": torch.full((SIZE,), NAN),
    "+inf": torch.full((SIZE,), INF),
    "-inf": torch.full((SIZE,), -INF),
    "one NaN": torch.tensor([3.0, 0.0, NAN, 1.0, 0.0, 0.0, 0.0, 0.0]),
    "one +inf": torch.tensor([INF, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
}
WHOLE = {
    "zeros": torch.zeros(SIZE),
    "denormal": torch.full((SIZE,), 1e-42) * torch.arange(SIZE),
    "some -inf": torch.tensor([3.0, -INF, -INF, 1.0, 0.0, 0.0, 0.0, 0.0]),
    "largest": torch.tensor([3e38, 3e38, 0.0, 1.0, 0.0, -3e38, 0.0, 0.0]),
}


def batch_of(rows: list[torch.Tensor], drafts: torch.Tensor, temperature: float = 1.0) -> Batch:
    """Requests that have the same drafts' logits, by place, and these draft tokens [NUM_REQS, K]."""
    width = len(rows) + 1
    values = make_batch([1], SIZE, dense=True)._replace(
        target_logits=P.expand(width * NUM_REQS, -1).contiguous(),
        cu_num_logits=torch.arange(NUM_REQS + 1, dtype=torch.int32) * width,
        draft_token_ids=torch.nn.functional.pad(drafts, (1, 0)).flatten(),
        positions=torch.arange(width).repeat(NUM_REQS) + 5,
        idx_mapping=torch.arange(NUM_REQS, dtype=torch.int32),
        max_num_draft=len(rows),
        draft_logits=torch.stack(rows).expand(NUM_REQS, -1, -1).contiguous(),
    )
    sampling = type(values.sampling)(torch.full((NUM_REQS,), temperature), torch.arange(NUM_REQS))
    return values._replace(sampling=sampling)


def drawn(rows: list[torch.Tensor]) -> torch.Tensor:
    """Draft tokens [NUM_REQS, K] of these logits; token 0 of what is no distribution, as samplers give."""
    rng = torch.Generator().manual_seed(1)
    chances = torch.stack([torch.softmax(row.double(), 0) for row in rows]).nan_to_num(0)
    chances[chances.sum(-1) == 0, 0] = 1
    return torch.stack([torch.multinomial(row, NUM_REQS, replacement=True, generator=rng) for row in chances], dim=1)


def follows_p(tokens: torch.Tensor, temperature: float = 1.0) -> bool:
    return p_value(tokens, torch.softmax(P.double() / temperature, 0)) > 1e-4


@by_reference
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", BROKEN)
def test_no_distribution_is_no_draft(name: str, temperature: float) -> None:
    """Kills: p / 0 that accepts; NaN that counts as -inf in q, where it was drawn otherwise; a residual of NaN."""
    rows = [BROKEN[name]]
    sampled, num_sampled = rejection_sample(*batch_of(rows, drawn(rows), temperature))
    assert (num_sampled == 1).all() and follows_p(sampled[:, 0], temperature)


@by_reference
@pytest.mark.parametrize("name", BROKEN)
def test_drafts_end_there(name: str) -> None:
    """Earlier tokens are verified as usual, and later ones are not reached. Fails if one broken row affects all
    rows."""
    whole = torch.linspace(2, -2, SIZE)
    rows = [whole, BROKEN[name], whole]
    sampled, num_sampled = rejection_sample(*batch_of(rows, drawn(rows)))
    shorter = batch_of([whole], drawn([whole]))
    alone = rejection_sample(*shorter)[1]
    assert num_sampled.max() == 2 and follows_p(sampled[:, 0])
    assert follows_p(sampled[num_sampled == 2, 1])
    assert torch.equal(num_sampled, alone)


@by_reference
@pytest.mark.parametrize("name", WHOLE)
def test_odd_distributions_are_drafts(name: str) -> None:
    """Kills: a check that refuses what can be drawn from; a sum that overflows."""
    rows = [WHOLE[name]]
    sampled, num_sampled = rejection_sample(*batch_of(rows, drawn(rows)))
    assert (num_sampled == 2).any() and follows_p(sampled[:, 0])


@by_reference
@pytest.mark.parametrize("name", {**BROKEN, **WHOLE})
def test_temperature_0(name: str) -> None:
    """Only p decides. Fails if a correct draft token is rejected because of its q."""
    rows = [{**BROKEN, **WHOLE}[name]]
    sampled, num_sampled = rejection_sample(*batch_of(rows, torch.full((NUM_REQS, 1), int(P.argmax())), 0.0))
    assert (num_sampled == 2).all() and (sampled == P.argmax()).all()


@needs_triton
def test_fused_equals_reference() -> None:
    """Every kind of row in every place of three drafts, at three temperatures. Kills: as above, in the kernels."""
    kinds, rng = list({**BROKEN, **WHOLE}.values()), torch.Generator().manual_seed(2)
    num_reqs = 3 * len(kinds)
    heat = torch.tensor([0.0, 0.8, 1.3]).repeat(2 * num_reqs)[: 2 * num_reqs]
    batch = make_batch([3] * num_reqs, SIZE, dense=True, temperature=heat, agreement=0.9)
    for request, state in enumerate(batch.idx_mapping.tolist()):
        batch.draft_logits[state, int(torch.randint(3, (1,), generator=rng))] = kinds[request % len(kinds)]
    assert_equals_reference(rejection_sample, *batch)
