"""Ragged batches of every kind, for the tests and the benchmark of verification."""

import math
from collections.abc import Callable
from typing import Any

import torch
from vllm_specplugins.kernels.rejection import Sampling
from vllm_specplugins.kernels.rejection.testing import Batch

TEMPERATURES = torch.tensor([0.0, 0.7, 1.0, 1.6])
# By request state; limits alone and together, some of which keep everything.
TRUNCATIONS: dict[str, dict[str, torch.Tensor]] = {
    "whole": {},
    "top_k": {"top_k": torch.tensor([0, 5, 300, 1], dtype=torch.int32)},
    "top_p": {"top_p": torch.tensor([1.0, 0.9, 0.4, 0.99])},
    "min_p": {"min_p": torch.tensor([0.0, 0.002, 0.02, 0.3])},
}
TRUNCATIONS["all"] = TRUNCATIONS["top_k"] | TRUNCATIONS["top_p"] | TRUNCATIONS["min_p"]


def of_states(truncation: str, num_states: int) -> dict[str, torch.Tensor]:
    """Limits, and temperatures, of so many states."""
    limits = {"temperature": TEMPERATURES, **TRUNCATIONS[truncation]}
    places, rounds = torch.arange(num_states) % 4, torch.arange(num_states) // 4
    return {name: values[(places + i * rounds) % 4] for i, (name, values) in enumerate(limits.items())}


def conditional(seed: int, vocab_size: int, sharpness: float) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A distribution after every prefix, some tokens impossible; sharpness inf: one-hot."""

    def after(prefix: tuple[int, ...]) -> torch.Tensor:
        rng = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**31)
        drawn = torch.rand(vocab_size, generator=rng, dtype=torch.float64)
        if sharpness == math.inf:
            return (drawn == drawn.max()).double()
        drawn = (drawn**sharpness).masked_fill_(torch.rand(vocab_size, generator=rng) < 0.2, 0) + 1e-300
        return drawn / drawn.sum()

    return after


def make_batch(
    num_draft: list[int],
    vocab_size: int,
    *,
    dense: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    agreement: float = 0.7,
    **sampling: Any,
) -> Batch:
    """A batch of requests with these numbers of drafts, at temperature 1 but for what `sampling` says. Drafts are the
    most probable token with probability `agreement`, else any; dense ones are drawn from q, which is p with some noise.
    The states of the requests are shuffled among twice as many.
    """
    rng = torch.Generator().manual_seed(seed)
    num_reqs, width = len(num_draft), max(num_draft)
    num_rows = torch.tensor(num_draft) + 1
    cu_num_logits = torch.nn.functional.pad(num_rows.cumsum(0), (1, 0)).int()
    num_logits = int(cu_num_logits[-1])
    logits = (torch.randn(num_logits, vocab_size, generator=rng) * 3).to(dtype)
    states = torch.randperm(2 * num_reqs, generator=rng)[:num_reqs]
    row_states = states.repeat_interleave(num_rows)
    local = torch.arange(num_logits) - cu_num_logits[:-1].repeat_interleave(num_rows)
    agrees = torch.rand(num_logits, generator=rng) < agreement
    drafted = torch.where(agrees, logits.argmax(-1), torch.randint(vocab_size, (num_logits,), generator=rng))
    draft_logits = None
    parameters = {"temperature": torch.ones(2 * num_reqs), **sampling}
    if dense:
        draft_logits = torch.full((2 * num_reqs, max(width, 1), vocab_size), torch.nan, dtype=dtype)
        noisy = logits + torch.randn(num_logits, vocab_size, generator=rng).to(dtype)
        has_draft = local < (num_rows - 1).repeat_interleave(num_rows)
        draft_logits[row_states[has_draft], local[has_draft]] = noisy[has_draft]
        heat = parameters["temperature"][row_states].clamp(min=1e-2)[:, None]
        drafted = torch.multinomial((noisy.float() / heat).softmax(-1), 1, generator=rng)[:, 0]
    return Batch(
        target_logits=logits,
        cu_num_logits=cu_num_logits,
        draft_token_ids=drafted.roll(1),  # the token fed at a row is drafted by the row before it
        positions=torch.randint(1000, (num_reqs,), generator=rng).repeat_interleave(num_rows) + local,
        idx_mapping=states.int(),
        sampling=Sampling(seeds=torch.randint(-(2**62), 2**62, (2 * num_reqs,), generator=rng), **parameters),
        max_num_draft=width,
        draft_logits=draft_logits,
    )
