"""Block verification of draft tokens: accepts at least as many as one by one, from the same distribution.

Front door: `block_rejection_sample`, with the arguments and the result of `rejection_sample`. A rejected draft may be
followed by better ones, so a step looks at all of its drafts before it decides. With a one-hot q that gains nothing (a
draft's tokens are then kept with their joint probability either way), and the token-wise operation runs. Sun et al.
2024, "Block Verification Accelerates Speculative Decoding".

Drafts must be drawn with noise that is fresh in every step. Noise of (seed, position) alone is not: what a step rejects
depends on drafts further on, whose noise the next step would use again at the same positions.
"""

from importlib import import_module
from typing import Any

from ...implementations import implementation_of
from .. import Sampling, check
from .. import rejection_sample as token_wise


def block_rejection_sample(
    target_logits: Any,
    cu_num_logits: Any,
    draft_token_ids: Any,
    positions: Any,
    idx_mapping: Any,
    sampling: Sampling,
    max_num_draft: int,
    draft_logits: Any = None,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Accepted drafts and one token more of each request; see `rejection_sample`, also for what it raises.

    >>> import torch
    >>> logits, seeds = torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.zeros(1, dtype=torch.int64)
    >>> block_rejection_sample(logits, torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([5, 6]),
    ...     torch.tensor([0]), Sampling(torch.zeros(1), seeds), 1, torch.zeros(1, 1, 2))
    (tensor([[1, 0]]), tensor([2], dtype=torch.int32))
    """
    arguments = target_logits, cu_num_logits, draft_token_ids, positions, idx_mapping
    if draft_logits is None or max_num_draft == 0:
        return token_wise(*arguments, sampling, max_num_draft, implementation=implementation)
    check(*arguments, max_num_draft, draft_logits)
    module = import_module(f".{implementation_of(target_logits, implementation)}", __name__)
    result: tuple[Any, Any] = module.block_rejection_sample(*arguments, sampling, max_num_draft, draft_logits)
    return result
