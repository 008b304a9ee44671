"""Drafts drawn under the requests' parameters: with the noise of verification, or with other noise and q.

If the proposer knows the target, the drafts equal the target's tokens. The kernels run in Triton's interpreter, which
has to be chosen before Triton is imported: a separate process.
"""

import pytest
import torch
from batches import p_value
from interpreted import DEVICE, assert_equals_reference, by_reference, needs_triton
from vllm_specplugins.kernels.rejection import Sampling, rejection_sample
from vllm_specplugins.kernels.rejection.drafts import coupled_sample, largest_probs_of, rated_sample, sample_with_q
from vllm_specplugins.kernels.rejection.inputs import to_device

NUM_REQS, VOCAB_SIZE = 400, 700
STATES = torch.arange(NUM_REQS)
LIMITS = {
    "whole": {},
    "truncated": {
        "top_k": torch.tensor([0, 5, 300, 1] * (NUM_REQS // 4), dtype=torch.int32),
        "top_p": torch.tensor([1.0, 0.9, 0.4, 0.99] * (NUM_REQS // 4)),
        "min_p": torch.tensor([0.0, 0.002, 0.02, 0.1] * (NUM_REQS // 4)),
    },
}


def of_requests(seed: int, num_reqs: int = NUM_REQS) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_reqs, VOCAB_SIZE, generator=rng) * 3
    return logits, torch.randint(1, 2**40, (num_reqs,), generator=rng)


def accepted(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    sampling: Sampling,
    q: torch.Tensor | None = None,
) -> float:
    """The share of drafts, one a request, that verification accepts."""
    fed, places = (torch.stack(pair, dim=1).flatten() for pair in ((drafts, drafts), (positions, positions + 1)))
    starts = torch.arange(0, 2 * NUM_REQS + 1, 2, dtype=torch.int32)
    layout = starts, fed, places, STATES
    rows, draft_logits = logits.repeat_interleave(2, dim=0), None if q is None else q[:, None]
    return float((rejection_sample(rows, *layout, sampling, 1, draft_logits)[1] == 2).float().mean())


@by_reference
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 3.0])
def test_a_right_guess_is_accepted(temperature: float, limits: str) -> None:
    """At every temperature and under every limit, coupled or with its q. Kills: noise of another stream or position;
    limits left out; a q that knows none, of which verification rejects a share; one cut elsewhere than p."""
    logits, positions = of_requests(5)
    sampling = Sampling(torch.full((NUM_REQS,), temperature), STATES * 77, **LIMITS[limits])
    assert accepted(logits, coupled_sample(logits, positions, sampling), positions, sampling) == 1.0
    drafting = Sampling(sampling.temperature, sampling.seeds + 1, **LIMITS[limits])
    drafts, q = sample_with_q(logits, positions, drafting)
    assert accepted(logits, drafts, positions, sampling, q) == 1.0
    uncut, whole = sample_with_q(logits, positions, Sampling(drafting.temperature, drafting.seeds))
    share = accepted(logits, uncut, positions, sampling, whole)
    assert (share < 0.99) == (limits == "truncated" and temperature > 0), "the test must see limits that are left out"


@by_reference
def test_a_near_guess_is_accepted_more_often_than_the_likeliest_token() -> None:
    """And the less the guess is off, the oftener; at most as often as any draft can be, the overlap of p and q."""
    (logits, positions), (error, _) = of_requests(6), of_requests(60)
    logits, error, sampling = logits / 1.2, error / 3, Sampling(torch.ones(NUM_REQS), STATES * 77)
    guesses = (coupled_sample(logits + scale * error, positions, sampling) for scale in (1.0, 0.3, 0.1))
    likeliest, *rates = (accepted(logits, drafts, positions, sampling) for drafts in (logits.argmax(-1), *guesses))
    assert likeliest < rates[1] < rates[2]
    assert rates[0] < rates[1]
    p, q = torch.softmax(logits, -1), torch.softmax(logits + 0.3 * error, -1)
    overlap = float(torch.minimum(p, q).sum(-1).mean())
    assert 0.6 * overlap < rates[1] < overlap + 3 * (0.25 / NUM_REQS) ** 0.5


@by_reference
def test_tokens_follow_q() -> None:
    """Chi-squared. Kills: a draw from what was cut; a temperature applied twice."""
    num_draws = 100_000
    logits = torch.linspace(-2, 2, 16).expand(num_draws, -1)
    sampling = Sampling(torch.full((num_draws,), 0.7), torch.arange(num_draws), min_p=torch.full((num_draws,), 0.05))
    drafts, q = sample_with_q(logits, torch.full((num_draws,), 9), sampling)
    law = torch.softmax(q[0].double() / 0.7, 0)
    assert 1 < (law > 0).sum() < 16 and p_value(drafts, law) > 1e-4


@by_reference
def test_what_is_no_number_stays() -> None:
    """Kills: a cut that hides NaN from verification, which then takes the draft for a sample of q."""
    logits, positions = of_requests(8, 4)
    logits[:, 3] = torch.nan
    limits = {name: values[:4] for name, values in LIMITS["truncated"].items()}
    _, q = sample_with_q(logits, positions, Sampling(torch.ones(4), STATES[:4], **limits))
    assert q[:, 3].isnan().all()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_equals_reference(dtype: torch.dtype) -> None:
    """Kills: a limit of another row; one that the kernel does not write."""
    num_reqs = 24
    logits, positions = of_requests(9, num_reqs)
    heat = torch.tensor([0.7, 1.3, 1.0]).repeat(num_reqs // 3)
    limits = {name: values[:num_reqs] for name, values in LIMITS["truncated"].items()}
    sampling = Sampling(heat, STATES[:num_reqs] * 5, **limits)
    assert_equals_reference(sample_with_q, logits.to(dtype), positions, sampling)


@needs_triton
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("greedy", [False, True])
def test_rated(greedy: bool, limits: str) -> None:
    """Probabilities to 1e-6. Fails if they are of what a limit leaves, of another temperature, or of greedy rows as at
    0; or if tokens are not those that are drawn without them."""
    logits, positions = of_requests(7, num_reqs := 16)
    logits[:4] *= 4
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.0] * (num_reqs // 4))
    limit = {name: values[:num_reqs] for name, values in LIMITS[limits].items()}
    sampling = Sampling(temperature, STATES[:num_reqs] * 77, **limit)
    for dtype in (torch.float32, torch.bfloat16):
        given = logits.to(dtype), positions, sampling
        rated = rated_sample(*to_device(given, DEVICE), greedy, "fused")
        tokens = given[0].argmax(-1) if greedy else coupled_sample(*given, "reference")
        assert torch.equal(rated[0].cpu(), tokens)
        torch.testing.assert_close(rated[1].cpu(), largest_probs_of(given[0], temperature), rtol=1e-6, atol=1e-6)
