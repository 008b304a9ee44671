"""Model Runner V1: helpers of vLLM's rejection sampler, which verifies where `verification` is "vllm"."""

import torch


def expand_batch_to_tokens(
    x: torch.Tensor,  # [num_reqs]
    cu_num_tokens: torch.Tensor,  # [num_reqs]
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeats a sampling parameter of each request, [num_reqs], for its draft tokens, [num_tokens]. It replaces vLLM's
    function. The CPU kernel of that one writes into a copy of its output: temperature, top-k and top-p of drafted
    positions stay uninitialised, and samples come from the wrong distribution.

    >>> expand_batch_to_tokens(torch.tensor([0.5, 0.0]), torch.tensor([2, 3]), 3, 0, 1)
    tensor([0.5000, 0.5000, 1.0000])
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def probs_of(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """q of drafted tokens, [num_reqs, K, vocab_size] float32; vLLM does not read it at temperature 0."""
    scale = torch.where(temperature == 0, 1.0, temperature)[:, None, None]
    return torch.softmax(logits.float() / scale, dim=-1)
