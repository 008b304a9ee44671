"""Runs `rejection_sample` with a one-hot q on a runner's step, and reads the step's arrays in place. On a GPU this
takes two launches, which also gather the drafts and count the rejected ones."""

from typing import Any

import torch

from ..implementations import implementation_of
from . import Layout, Sampling, rejection_sample


def sample_step(
    target_logits: torch.Tensor,  # [num_logits, vocab_size]
    layout: Layout,
    sampling: Sampling,
    max_num_draft: int,
    implementation: str | None = None,
    operation: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the emitted tokens and the number of rejected drafts. Within its prompt a request has neither; at the end
    of its prompt it has no drafts yet, so their placeholders are rejected.

    Args:
        layout: `draft_token_ids` and `positions` [num_tokens] of all fed tokens, `logits_indices` [num_logits] of the
            rows among these, `seq_lens` [>= num_reqs] with the fed tokens, `prefill_len` [num_states] of the prompts.
        operation: replaces `rejection_sample`; takes its first seven arguments.

    Returns:
        sampled [num_reqs, max_num_draft + 1] int64, padded with -1, num_sampled and num_rejected [num_reqs] int32.

    >>> logits, zeros = torch.tensor([[0.0, 9.0], [9.0, 0.0]]), torch.zeros(1, dtype=torch.int64)
    >>> layout = Layout(
    ...     cu_num_logits=torch.tensor([0, 2]), draft_token_ids=torch.tensor([5, 6, 0]),
    ...     positions=torch.tensor([4, 5, 6]), idx_mapping=zeros, logits_indices=torch.tensor([1, 2]),
    ...     seq_lens=torch.tensor([7]), prefill_len=torch.tensor([5]))
    >>> sample_step(logits, layout, Sampling(torch.zeros(1), zeros), max_num_draft=1)
    (tensor([[ 1, -1]]), tensor([1], dtype=torch.int32), tensor([1], dtype=torch.int32))
    """
    name = implementation_of(target_logits, implementation, "host")
    if name == "fused" and operation is None:
        from . import fused

        return fused.rejection_sample(target_logits, layout, sampling, max_num_draft)[:3]
    starts, fed_at = layout.cu_num_logits.long(), layout.positions[layout.logits_indices]
    prefill_len = layout.prefill_len[layout.idx_mapping.long()]
    num_rows, rows = starts.diff(), torch.arange(len(fed_at), device=fed_at.device)
    first = starts[:-1].repeat_interleave(num_rows, output_size=len(fed_at))
    is_placeholder = (rows > first) & (fed_at[first] < prefill_len.repeat_interleave(num_rows, output_size=len(fed_at)))
    drafts = layout.draft_token_ids[layout.logits_indices].long().masked_fill(is_placeholder, -1)
    given = target_logits, layout.cu_num_logits, drafts, fed_at + 1, layout.idx_mapping, sampling, max_num_draft
    sampled, num_sampled = operation(*given) if operation else rejection_sample(*given, None, name)
    goes_on = layout.seq_lens[: len(prefill_len)] < prefill_len
    num_rejected = (num_rows.int() - num_sampled).masked_fill(goes_on, 0)
    return sampled.masked_fill(goes_on[:, None], -1), num_sampled.masked_fill(goes_on, 0), num_rejected
