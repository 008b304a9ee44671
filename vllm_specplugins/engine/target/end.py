"""The target's final norm and head as training needs them: with gradients, which vLLM's own operations may lack."""

import logging
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig

from vllm_specplugins.proposers.heads.distillation import effective_norm_weight
from vllm_specplugins.proposers.learning.served import ServedEnd

logger = logging.getLogger("vllm.specplugins")

_PROBES = 8
_TOLERANCE = 0.03  # of the largest logit


def served_end(target: nn.Module, config: ModelConfig) -> ServedEnd | None:
    """Read from a model; None, with a sentence in the log, where what was read does not compute what the model does."""
    model: Any = target
    num_layers, vocab_size = config.get_total_num_hidden_layers(), config.get_vocab_size()
    with torch.inference_mode(False), torch.no_grad():
        try:
            end = _read(model, num_layers, vocab_size)
            weight = end.norm_weight
            token_ids = torch.arange(_PROBES, device=weight.device)
            states = end.passes(num_layers, _PROBES)(end.embed(token_ids)).to(model.lm_head.weight.dtype)
            own, theirs = end.logits(states), model.compute_logits(states).float()
            fits = own.shape == theirs.shape and bool((own - theirs).abs().max() <= _TOLERANCE * theirs.abs().max())
        except (AttributeError, TypeError, ValueError, RuntimeError):
            fits = False
    if fits:
        return end
    logger.warning("learn: nothing is learned, for the head of %s cannot be trained through.", type(model).__name__)
    return None


def _read(model: Any, num_layers: int, vocab_size: int) -> ServedEnd:
    norm, processor = model.model.norm, model.logits_processor
    eps, head = float(getattr(norm, "variance_epsilon", 0.0)), model.lm_head.weight[:vocab_size].detach()
    weight = effective_norm_weight(norm, norm.weight, eps)
    if weight is None:
        raise ValueError("no RMSNorm")
    embed = model.model.embed_input_ids
    return ServedEnd(embed, weight, eps, head, float(processor.scale), processor.soft_cap, num_layers)
