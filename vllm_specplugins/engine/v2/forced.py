"""Model Runner V2: puts what a grammar forced among the drafts, which lie on the device."""

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_specplugins.engine.grammar.output import forced_in


def put_forced(runner: Any, scheduler_output: Any) -> None:
    """Before the step that verifies them; each is certain, where drafts have a q."""
    slots_of = runner.req_states.req_id_to_index
    forced = forced_in(scheduler_output).items()
    cells = [(slots_of[id_], num + i, token) for id_, (num, ids) in forced for i, token in enumerate(ids)]
    if not cells:
        return
    slots, columns, tokens = async_tensor_h2d(np.array(cells, np.int64), runner.device).unbind(1)
    drafts, draft_logits = runner.req_states.draft_tokens, runner.speculator.draft_logits
    drafts[slots, columns] = tokens.to(drafts.dtype)
    if draft_logits is not None:
        one_hot = draft_logits.new_full((len(cells), draft_logits.shape[-1]), -torch.inf)
        draft_logits[slots, columns] = one_hot.scatter_(1, tokens[:, None], 0.0)
