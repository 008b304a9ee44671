"""Compares compiled verification on a CPU with its reference: the same noise and the same tokens, to the last bit."""

import itertools

import numpy as np
import pytest
import torch
from batches import TRUNCATIONS, of_states
from vllm_specplugins.kernels.rejection import host, noise, rejection_sample
from vllm_specplugins.kernels.rejection.inputs import Batch, make_batch
from vllm_specplugins.kernels.rejection.truncation import thresholds

LARGEST = 2**63 - 1
EXTREMES = torch.tensor([0, 1, -1, 2**55, -(2**62), LARGEST, -LARGEST - 1])


def assert_same(batch: Batch) -> torch.Tensor:
    results = rejection_sample(*batch, implementation="host")
    for ours, theirs in zip(results, rejection_sample(*batch, implementation="reference"), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return results[0]


@pytest.mark.parametrize("stream", [noise.GROUP, noise.TOKEN, noise.RECOVERED_TOKEN])
def test_noise(stream: int) -> None:
    """Kills: an arithmetic shift of a negative state; a stream at other bits; another rounding."""
    rng = torch.Generator().manual_seed(stream)
    seeds = torch.cat([EXTREMES, torch.randint(-LARGEST, LARGEST, (500,), generator=rng)])
    positions = torch.randint(2**55, (len(seeds),), generator=rng)
    begins = torch.randint(200_000, (len(seeds),), generator=rng)
    ours = torch.empty(len(seeds), 256)
    host._negated_uniform(seeds.numpy(), positions.numpy(), stream, begins.numpy(), ours.numpy())
    keys = noise.keys(seeds, positions, stream)[:, None]
    assert torch.equal(-ours, noise.uniform(keys, begins[:, None] + torch.arange(256)))


def test_noise_is_never_infinite() -> None:
    """A number in 2**25 would be 1. Kills: one that is not clamped."""
    numbers, one = torch.empty(1, 1 << 22), np.ones(1, np.int64)
    for begin in range(0, 1 << 27, 1 << 22):
        host._negated_uniform(one, one, noise.TOKEN, one * begin, numbers.numpy())
        assert numbers.min() > -1 and numbers.max() < 0


def test_arrivals() -> None:
    """Of weights that are the noise itself all arrive at once. Kills: a logarithm that rounds otherwise."""
    seeds, positions = torch.arange(2000), torch.arange(2000) * 7
    begins = torch.arange(2000) % 3
    weights = noise.exponential(noise.keys(seeds, positions, noise.GROUP)[:, None], torch.arange(259))
    winners = host.heat(weights, begins.numpy(), 256, seeds.numpy(), positions.numpy(), noise.GROUP)
    assert winners.tolist() == begins.tolist()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 3001])
def test_forbidden_tokens(vocab_size: int) -> None:
    """Words of a mask that allow all tokens, none and some, and bits after the vocabulary. Kills: a token that is
    forbidden for its neighbour; the sign bit; a word that is not whole; logits that are a part of rows."""
    rng = np.random.default_rng(vocab_size)
    num_words = -(-vocab_size // 32)
    masks = rng.integers(-(2**31), 2**31, (40, num_words)).astype(np.int32)
    masks[rng.random(masks.shape) < 0.3], masks[rng.random(masks.shape) < 0.3] = 0, -1
    logits = rng.standard_normal((40, vocab_size)).astype(np.float32)
    is_allowed = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size] == 1
    expected = np.where(is_allowed, logits, -np.inf)
    part = np.concatenate([logits, logits], axis=1)
    host.forbid(part[:, :vocab_size], masks)
    assert np.array_equal(part, np.concatenate([expected, logits], axis=1))
    host.forbid(logits, masks)
    assert np.array_equal(logits, expected)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 3001])
def test_equals_reference(vocab_size: int, truncation: str) -> None:
    """Ragged, with requests of no draft. Kills: a group cut off; a row or a state mixed up; a tie that moves."""
    tokens = []
    for seed, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 4):
        chosen = of_states(truncation, 20) | ({} if seed % 3 else {"temperature": torch.full((20,), 0.8)})
        batch = make_batch([3, 0, 4, 1, 2, 0, 5, 2, 1, 4], vocab_size, seed=seed, dtype=dtype, **chosen)
        far = 2**40 * (seed % 2)
        batch.sampling.seeds[: len(EXTREMES)] = EXTREMES
        tokens.append(assert_same(batch._replace(positions=batch.positions + far)))
    assert vocab_size == 1 or len(torch.cat(tokens).unique()) > 4


def test_draws_many() -> None:
    """20,000 draws from close weights. Kills: positions of other rows."""
    batch = make_batch([0] * 20_000, 600)
    tokens = assert_same(batch._replace(target_logits=batch.target_logits / 100))
    assert len(tokens.unique()) == 600


def test_chunks(monkeypatch) -> None:
    """Kills: a chunk that takes the states or positions of another; a chunk of greedy rows in a random batch."""
    monkeypatch.setattr("vllm_specplugins.kernels.rejection.reference._CHUNK_ELEMENTS", 1200)
    batch = make_batch([3, 0, 4, 1, 2, 0], 600, temperature=torch.tensor([0.0, 0.0, 0.7] * 4), agreement=0.9)
    assert_same(batch)


@pytest.mark.parametrize("truncation", ["whole", "min_p", "all"])
def test_strange_logits(truncation: str) -> None:
    """-inf, NaN and +inf, whole rows of them. Kills: a token that nothing decides; NaN that wins."""
    parameters = of_states(truncation, 8)
    for heat in (parameters["temperature"], torch.zeros(8), torch.ones(8)):
        batch = make_batch([3] * 4, 300, **(parameters | {"temperature": heat}))
        rng = torch.Generator().manual_seed(5)
        for value, share in ((-torch.inf, 0.5), (torch.nan, 0.3), (torch.inf, 0.005)):
            batch.target_logits[torch.rand(batch.target_logits.shape, generator=rng) < share] = value
        for row, value in zip((0, 6, 9, 12), (-torch.inf, torch.nan, torch.inf, -torch.inf), strict=True):
            batch.target_logits[row] = value
        tokens = assert_same(batch)
        assert (tokens[:, 0] >= 0).all() and (tokens < 300).all()


def test_layouts() -> None:
    """Rows of a wider tensor, other integer types, a request without rows, drafts beyond the width, drafts of -1."""
    batch = make_batch([2, 3, 1], 300, agreement=1.0, min_p=torch.full((6,), 0.01))
    wide = torch.full((len(batch.target_logits), 320), 99.0)
    wide[:, :300] = batch.target_logits
    strided = batch._replace(target_logits=wide[:, :300], cu_num_logits=batch.cu_num_logits.long())
    assert torch.equal(assert_same(strided), assert_same(batch))
    assert_same(batch._replace(idx_mapping=batch.idx_mapping.int(), draft_token_ids=batch.draft_token_ids.long()))
    assert_same(batch._replace(max_num_draft=1))
    assert_same(batch._replace(max_num_draft=7))
    assert_same(batch._replace(draft_token_ids=torch.full_like(batch.draft_token_ids, -1)))
    more = torch.cat([batch.cu_num_logits[:2], batch.cu_num_logits[1:]])
    assert assert_same(batch._replace(cu_num_logits=more, idx_mapping=batch.idx_mapping[[0, 1, 1, 2]]))[1, 0] == -1


@pytest.mark.parametrize("min_p", [0.0, 0.01, 1.0])
def test_min_p_alone(min_p: float) -> None:
    """As among the other limits, which keep everything here."""
    logits, ones = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)), torch.ones(4)
    logits[3] = -torch.inf
    alone = thresholds(logits, ones, logits.exp2(), None, None, ones * min_p)
    assert torch.equal(alone, thresholds(logits, ones, logits.exp2(), None, ones, ones * min_p))


def test_is_chosen_and_compiled_before() -> None:
    """Without q on a CPU; what was compiled at import is all that ever is."""
    compiled = [
        value for value in vars(host).values() if hasattr(value, "signatures") and value is not host._splitmix64
    ]
    before = [list(function.signatures) for function in compiled]
    assert len(compiled) == 4 and all(before)
    for dtype, dense in itertools.product([torch.float32, torch.bfloat16], [False, True]):
        rejection_sample(*make_batch([2, 0], 300, dense=dense, dtype=dtype))
    assert [list(function.signatures) for function in compiled] == before
    with pytest.raises(ValueError, match="must be one of fused, reference"):
        rejection_sample(*make_batch([2, 0], 300, dense=True), implementation="host")
