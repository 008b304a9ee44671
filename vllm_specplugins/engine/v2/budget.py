"""Model Runner V2: vLLM's manager of adaptive verification shares a step's budget out in one launch of ours.

vLLM's own is some twenty operations on the device and a function that torch.compile compiles when it is first called,
in the middle of serving.
"""

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.kernels.budget import Layout, share_budget


def share_in_one_launch(manager: Any) -> None:
    """From now on; the kernel is compiled here."""
    layout = Layout(manager._cu_num_logits, manager.query_start_loc)
    chances, num_bonus = manager._confidence_probs, manager.num_bonus_tokens
    device = chances.device

    def reallocate_drafts(request_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """vLLM's; what `get_num_tokens` has left there is used once."""
        (drafts, others, budget), manager._batch_budget = manager._batch_budget, None
        counts = np.array([[numbers[name] for name in request_ids] for numbers in (drafts, others)], np.int32)
        share_budget(layout, chances, idx_mapping, async_tensor_h2d(counts, device), budget, num_bonus)
        # vLLM 0.33 hands out what was admitted, too, where sampling is sharded by batch: then nothing is trimmed.
        more = (None,) if hasattr(manager, "_copy_admitted_drafts_to_host") else ()
        return layout.cu_num_logits[: len(request_ids) + 1], layout.query_start_loc, budget, *more

    for num_rows in (1, 33, 257):  # each variant
        if num_rows <= len(chances):
            slots, counts = torch.zeros(num_rows, device=device).long(), torch.zeros(2, num_rows, device=device).int()
            share_budget(layout, chances, slots, counts, 0, num_bonus)
    manager.reallocate_drafts = reallocate_drafts
