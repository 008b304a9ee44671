"""Measures a model's final norm, which training needs with gradients."""

import math
from typing import Any

import torch
import torch.nn.functional as F


def effective_norm_weight(norm: Any, like: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Returns the factors of an RMSNorm, [H] float32, measured with inputs like `like` (device, dtype); None for
    another norm."""
    if getattr(norm, "weight", None) is None or norm.weight.ndim != 1:
        return None
    size = len(norm.weight)
    weight: torch.Tensor = norm(like.new_ones(1, size))[0].float() * math.sqrt(1 + eps)
    probe = torch.linspace(-1, 2, size, dtype=like.dtype, device=like.device)[None]
    expected = F.rms_norm(probe.float(), weight.shape, weight, eps)
    return weight if torch.allclose(norm(probe).float(), expected, rtol=0.05, atol=0.05) else None
