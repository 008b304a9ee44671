"""Creates the learner for parts that learn during serving, and the target's last modules, which training needs."""

import logging
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig

from vllm_specplugins.proposers.draft_sampler import ModelProposer
from vllm_specplugins.proposers.early_exit import EarlyExit
from vllm_specplugins.proposers.heads.medusa_heads import MedusaHeads
from vllm_specplugins.proposers.heads.norm import effective_norm_weight
from vllm_specplugins.proposers.learning.learner import Learner
from vllm_specplugins.proposers.learning.served import ServedEnd
from vllm_specplugins.proposers.learning.windows import ExitStates
from vllm_specplugins.stage import stages_of

logger = logging.getLogger("vllm.specplugins")
_NUM_PROBES = 8
_TOLERANCE = 0.03  # of the largest logit


def new_learner(proposer: Any, target: Any, vllm_config: VllmConfig) -> Learner | None:
    """Returns the learner of the proposer or of a cascade's stage, for a loaded target; None if no part learns."""
    stages = (stage for _, stage in stages_of(proposer, "") if isinstance(stage, ModelProposer))
    learning = (stage for stage in stages if stage.config.is_trained)
    if (stage := next(learning, None)) is None:
        return None
    model, index = vllm_config.model_config, vllm_config.parallel_config.data_parallel_index
    end = served_end(target, model.get_total_num_hidden_layers(), model.get_vocab_size())
    if end is None:
        return None
    exits = None
    if isinstance(stage, EarlyExit):
        sizes = vllm_config.scheduler_config.max_num_seqs, stage.max_num_draft, len(end.norm_weight)
        exits = stage.watch = ExitStates(*sizes, end.norm_weight.device, model.dtype)
    config, num_draft = stage.config.learn, stage.max_num_draft
    if config.path is not None and index:
        config = replace(config, path=f"{config.path}.dp{index}")
    if isinstance(stage.part, MedusaHeads):
        num_draft = min(num_draft, len(stage.part.layers[0]))
    stage.training = Learner(stage.part, config, end, num_draft, exits)
    return stage.training


def served_end(model: Any, num_layers: int, vocab_size: int) -> ServedEnd | None:
    """Returns the last modules of a loaded model, which compute its logits. If they cannot be used, it logs a line and
    returns None."""
    with torch.inference_mode(False), torch.no_grad():
        try:
            end = _read(model, num_layers, vocab_size)
            token_ids = torch.arange(_NUM_PROBES, device=end.norm_weight.device)
            states = end.passes(num_layers, _NUM_PROBES)(end.embed(token_ids)).to(model.lm_head.weight.dtype)
            logits, expected = end.logits(states), model.compute_logits(states).float()
            if bool((logits - expected).abs().max() <= _TOLERANCE * expected.abs().max()):
                return end
        except (AttributeError, TypeError, ValueError, RuntimeError):  # a model with other modules or shapes
            pass
    logger.warning(
        "learn trains nothing, because gradients cannot pass through the output head of %s. Remove the field learn.",
        type(model).__name__,
    )
    return None


def _read(model: Any, num_layers: int, vocab_size: int) -> ServedEnd:
    norm, processor = model.model.norm, model.logits_processor
    eps, head = float(getattr(norm, "variance_epsilon", 0.0)), model.lm_head.weight[:vocab_size].detach()
    weight = effective_norm_weight(norm, norm.weight, eps)
    if weight is None:
        raise ValueError("no RMSNorm")
    embed = model.model.embed_input_ids
    return ServedEnd(embed, weight, eps, head, float(processor.scale), processor.soft_cap, num_layers)
