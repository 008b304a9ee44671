"""Gumbel-max sampling with counter-based noise, in PyTorch.

Adding Gumbel noise to logits and taking the argmax samples their softmax. The noise of a token is a function of the
request's seed, the position that is drawn for and the token, so a draw depends on neither the batch nor the device.
N: rows, V: vocabulary.
"""

import torch

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(constant: int) -> int:
    """An unsigned 64-bit constant as the int64 that has its bits."""
    constant &= _MASK
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def splitmix64(state: torch.Tensor) -> torch.Tensor:
    """64 mixed bits of each int64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").

    >>> splitmix64(torch.tensor([0])) == _signed(0xE220A8397B1DCDAF)
    tensor([True])
    """
    bits = state + _signed(_STEP)
    # int64 shifts are arithmetic: the mask clears the copies of the sign.
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * _signed(_FIRST)
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * _signed(_SECOND)
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential(1) noise [N, V] float32 for rows with these seeds and positions, [N] int64 each."""
    rows = splitmix64(splitmix64(seeds) ^ positions)
    tokens = torch.arange(vocab_size, device=seeds.device) * _signed(_STEP)
    # The upper 32 bits. The smallest noise decides, so it is where it is small that it has to be fine: -log1p(-u).
    uniform = ((splitmix64(rows[:, None] + tokens) >> 32 & (1 << 32) - 1).float() + 0.5) * 2.0**-32
    return -torch.log1p(-uniform.clamp_(max=1 - 2.0**-24))


def gumbel_sample(
    logits: torch.Tensor,  # [N, V]
    temperature: torch.Tensor,  # [N] float32
    seeds: torch.Tensor,  # [N] int64
    positions: torch.Tensor,  # [N] int64
) -> torch.Tensor:
    """See the front door."""
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    scaled.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    noise = exponential(seeds, positions, logits.shape[-1]).log_()
    return (scaled - torch.where(greedy[:, None], 0.0, noise)).argmax(dim=-1)
