"""Sampling whose noise depends on (seed, position, token) alone: the Gumbel-max trick with counter-based bits.

Front door: `gumbel_sample` picks the implementation. N: rows, V: vocabulary.
"""

from importlib import import_module
from typing import Any

from ..implementations import implementation_of


def gumbel_sample(
    # [N, V] bfloat16, float16 or float32
    logits: Any,
    # [N] float32, 0: the most probable token
    temperature: Any,
    # [N] int64 each; the position is the one that is drawn for
    seeds: Any,
    positions: Any,
    implementation: str | None = None,
) -> Any:
    """Token ids [N] int64, drawn from softmax(logits / temperature); at temperature 0 the first of the most probable.

    NaN logits count as -inf. A row of -inf alone gives token 0.

    Args:
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.

    Raises:
        ValueError: no such implementation.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 1.0, 5.0], [0.0, 1.0, 5.0]])
    >>> seeds = positions = torch.tensor([7, 7])
    >>> gumbel_sample(logits, torch.tensor([0.0, 9.0]), seeds, positions).shape
    torch.Size([2])
    """
    module = import_module(f".{implementation_of(logits, implementation)}", __name__)
    return module.gumbel_sample(logits, temperature, seeds, positions)
