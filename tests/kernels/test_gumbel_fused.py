"""Gumbel-max sampling in Triton beside its reference: the same tokens, and one read of the logits.

On a GPU as it is, else in Triton's interpreter, which has to be chosen before Triton is imported: a process of its own.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
from vllm_specplugins.kernels.gumbel import gumbel_sample

sys.path.insert(0, str(Path(__file__).parent))
from interpreted import DEVICE, INTERPRETED, RUNS, bytes_moved, needs_triton, run_interpreted

EXTREMES = torch.tensor([0, -1, 2**63 - 1, -(2**63), 5])


@pytest.mark.skipif(RUNS, reason="is that process")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def make_rows(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits, temperatures of which every third is 0, seeds, positions; the rows are those of a wider tensor."""
    rng = torch.Generator().manual_seed(vocab_size)
    wide = (torch.randn(num_rows, vocab_size + 9, generator=rng) * 3).to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.3]).repeat(-(-num_rows // 3))[:num_rows]
    seeds = torch.randint(-(2**62), 2**62, (num_rows,), generator=rng)
    seeds[: len(EXTREMES)] = EXTREMES[:num_rows]
    return wide[:, :vocab_size], temperature, seeds, torch.randint(2**40, (num_rows,), generator=rng)


def assert_same(rows: tuple[torch.Tensor, ...], num_near_ties: int = 0) -> torch.Tensor:
    """Row by row; a near tie (scores closer than float32 can tell) may go either way."""
    expected = gumbel_sample(*rows, implementation="reference")
    ours = gumbel_sample(*(tensor.to(DEVICE) for tensor in rows), implementation="fused").cpu()
    assert ours.dtype == torch.int64
    assert int((ours != expected).sum()) <= num_near_ties, (expected, ours)
    return ours


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 2047, 2049, 5001])
def test_equals_reference(vocab_size: int, dtype: torch.dtype) -> None:
    """Kills: a mask off by one; noise of another token, seed or position; temperature 0 that draws."""
    tokens = assert_same(make_rows(24, vocab_size, dtype))
    assert vocab_size == 1 or len(tokens.unique()) > 3


@needs_triton
def test_many_draws() -> None:
    """From close weights, so that the noise decides. Kills: coarse noise; a temperature that is multiplied."""
    logits, temperature, seeds, positions = make_rows(600, 1500, torch.float32)
    tokens = assert_same((logits / 30, temperature.clamp(min=0.5), seeds, positions), num_near_ties=1)
    assert len(tokens.unique()) > 400


@needs_triton
def test_ties() -> None:
    """Within a tile, across tiles, with the end. Kills: a tie that goes to the last; a tile that counts as a token."""
    logits = torch.zeros(4, 5000)
    logits[1, [2500, 4999]] = logits[2, [2047, 2048]] = logits[3, 4999] = 1.0
    rows = logits, torch.zeros(4), EXTREMES[:4], torch.arange(4)
    assert assert_same(rows).tolist() == [0, 2500, 2047, 4999]
    assert_same((logits, torch.ones(4), EXTREMES[:4], torch.arange(4)))


@needs_triton
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_strange_logits(temperature: float) -> None:
    """-inf, NaN and +inf, whole rows of them. Kills: NaN that wins; an id outside of the vocabulary."""
    logits, _, seeds, positions = make_rows(8, 3000, torch.float16)
    logits, rng = logits.clone(), torch.Generator().manual_seed(2)
    for value, share in ((-math.inf, 0.5), (math.nan, 0.3), (math.inf, 0.001)):
        logits[torch.rand(logits.shape, generator=rng) < share] = value
    logits[0], logits[1], logits[2] = -math.inf, math.nan, math.inf
    tokens = assert_same((logits, torch.full((8,), temperature), seeds, positions))
    assert tokens[:3].tolist() == [0, 0, 0] and (tokens < 3000).all()


@pytest.mark.skipif(not INTERPRETED, reason="counts in the interpreter")
def test_bytes_moved() -> None:
    """In reads of the logits."""
    rows = make_rows(4, 32_768, torch.bfloat16)
    with bytes_moved() as moved:
        gumbel_sample(*rows, implementation="fused")
    share = moved["all"] / (2 * rows[0].numel())
    print(f"gumbel: {share:.3f}")
    assert share <= 1.02
