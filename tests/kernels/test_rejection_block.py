"""Block verification: its exact law and its expected acceptance by enumeration in fp64, and its draws."""

import itertools
import math
from functools import partial

import pytest
import torch
from batches import conditional, make_batch
from scipy.stats import chisquare
from vllm_specplugins.kernels.rejection import reference, rejection_sample

block_rejection_sample = partial(rejection_sample, block=True)


def outcomes(target, proposer, vocab_size: int, num_draft: int):
    """(emitted tokens, probability, number accepted) of every draft, choice and last token."""
    for drafts in itertools.product(range(vocab_size), repeat=num_draft):
        chance = math.prod(float(proposer(drafts[:i])[drafts[i]]) for i in range(num_draft))
        if chance == 0:
            continue
        p = torch.stack([target(drafts[:i]) for i in range(num_draft + 1)])
        q = torch.stack([proposer(drafts[:i]) for i in range(num_draft)])
        token = torch.tensor(drafts)[:, None]
        ratio = reference.draft_ratio(p[:-1].gather(1, token), q.gather(1, token))[:, 0]
        joint, keep = reference.keep_probs(p[None], q[None], ratio[None], torch.tensor([num_draft]))
        for n in range(num_draft + 1):
            # The largest that is kept.
            stops = chance * float(keep[0, n] * (1 - keep[0, n + 1 :]).prod())
            weights = reference.residual(p[n], q[n], joint[0, n]) if n < num_draft else p[n]
            if stops > 0:
                law = weights / weights.sum()
                yield from (((*drafts[:n], x), stops * float(law[x]), n) for x in range(vocab_size))


CASES = [(3, 1, 1.0), (3, 2, 0.5), (3, 3, 1.0), (4, 2, 4.0), (3, 2, math.inf), (2, 4, 1.0)]


@pytest.mark.parametrize(("vocab_size", "num_draft", "sharpness"), CASES)
def test_law(vocab_size: int, num_draft: int, sharpness: float) -> None:
    """What a step emits, the rest drawn from the target, follows the target. Kills: h_i with r_{i-1}; r_i above 1."""
    target, proposer = conditional(1, vocab_size, 2.0), conditional(2, vocab_size, sharpness)
    law: dict[tuple[int, ...], float] = {}
    for emitted, probability, _ in outcomes(target, proposer, vocab_size, num_draft):
        law[emitted] = law.get(emitted, 0.0) + probability
    for text in itertools.product(range(vocab_size), repeat=num_draft + 1):
        chances = [float(target(text[:i])[text[i]]) for i in range(num_draft + 1)]
        ours = sum(law.get(text[:n], 0.0) * math.prod(chances[n:]) for n in range(1, num_draft + 2))
        assert abs(ours - math.prod(chances)) < 1e-12


@pytest.mark.parametrize(("vocab_size", "num_draft", "sharpness"), CASES)
def test_accepts_no_less_than_token_wise(vocab_size: int, num_draft: int, sharpness: float) -> None:
    """More where there is anything to gain; the same with one draft and with a one-hot q."""
    target, proposer = conditional(1, vocab_size, 2.0), conditional(2, vocab_size, sharpness)
    ours = sum(probability * n for _, probability, n in outcomes(target, proposer, vocab_size, num_draft))
    theirs = 0.0
    for length in range(1, num_draft + 1):
        for drafts in itertools.product(range(vocab_size), repeat=length):
            pairs = [(target(drafts[:i])[d], proposer(drafts[:i])[d]) for i, d in enumerate(drafts)]
            theirs += math.prod(float(q * reference.draft_ratio(p, q).clamp(max=1)) for p, q in pairs)
    assert ours >= theirs - 1e-12
    assert (ours > theirs + 1e-6) == (num_draft > 1 and sharpness < math.inf)


def test_chi_squared() -> None:
    """The first two tokens of 100 k requests with two drafts. Kills: the residual without the joint ratio."""
    num_reqs, size = 100_000, 4
    p_logits, q_logits = torch.tensor([0.0, 1.0, -1.0, 0.5]), torch.tensor([1.0, -0.5, 0.0, 0.3])
    rng = torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q_logits.softmax(0), 2 * num_reqs, replacement=True, generator=rng).view(num_reqs, 2)
    batch = make_batch([2] * 2, size, dense=True)._replace(
        target_logits=p_logits.expand(3 * num_reqs, -1),
        cu_num_logits=torch.arange(num_reqs + 1) * 3,
        draft_token_ids=torch.nn.functional.pad(drafts, (1, 0)).flatten(),
        positions=torch.arange(3).repeat(num_reqs) + 5,
        idx_mapping=torch.arange(num_reqs),
        draft_logits=q_logits.expand(num_reqs, 2, -1),
    )
    ones = torch.ones(num_reqs)
    batch = batch._replace(sampling=type(batch.sampling)(ones, torch.arange(num_reqs)))
    sampled, num_sampled = block_rejection_sample(*batch)
    p = p_logits.double().softmax(0)
    first = torch.bincount(sampled[:, 0], minlength=size)
    assert chisquare(first.numpy(), (p * num_reqs).numpy()).pvalue > 1e-4
    # A second token is emitted more often behind some firsts; missing ones come from the target.
    filled = torch.where(
        num_sampled > 1, sampled[:, 1], torch.multinomial(p, num_reqs, replacement=True, generator=rng)
    )
    pairs = torch.bincount(sampled[:, 0] * size + filled, minlength=size**2)
    assert chisquare(pairs.numpy(), (torch.outer(p, p).flatten() * num_reqs).numpy()).pvalue > 1e-4
    token_by_token = rejection_sample(*batch)[1].sum()
    assert num_sampled.sum() > token_by_token


def test_temperature_0_and_ragged() -> None:
    """Greedy requests as token by token; requests of no draft, of no row; drafts of -1."""
    greedy = make_batch([3, 0, 2, 3], 40, dense=True, temperature=torch.zeros(8), agreement=0.8)
    for ours, theirs in zip(block_rejection_sample(*greedy), rejection_sample(*greedy), strict=True):
        assert torch.equal(ours, theirs)
    batch = make_batch([3, 0, 2, 3], 40, dense=True)
    num_sampled = block_rejection_sample(*batch)[1]
    assert num_sampled[1] == 1 and (num_sampled <= torch.tensor([4, 1, 3, 4])).all()
    rejected = batch._replace(draft_token_ids=torch.full_like(batch.draft_token_ids, -1))
    assert (block_rejection_sample(*rejected)[1] == 1).all()
    more = torch.cat([batch.cu_num_logits, batch.cu_num_logits[-1:]])
    padded = batch._replace(cu_num_logits=more, idx_mapping=torch.cat([batch.idx_mapping, batch.idx_mapping[:1]]))
    assert block_rejection_sample(*padded)[1].tolist() == [*num_sampled.tolist(), 0]
    one_hot = batch._replace(draft_logits=None)
    assert torch.equal(block_rejection_sample(*one_hot)[0], rejection_sample(*one_hot)[0])
