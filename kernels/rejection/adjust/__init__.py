"""Edits of logits before verification, exact at every position: masks, logit bias, penalties, bad words.

Front door: `adjust` gives float32 logits for `rejection_sample`; `Edits` says what is edited. The parameters are rarely
used: they cost a copy, which batches without them do not make. Order as in vLLM: masks, logit bias, penalties.
num_logits, num_states: as in the parent package; M: entries of a list.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Edits:
    """What is edited, by request state; None where no request of the batch asks for it."""

    # [num_states, vocab_size] bool
    allowed_mask: Any = None
    # [num_logits, ceil(vocab_size / 32)] int32, bit t % 32 of word t // 32: a grammar's permission, by row
    bitmask: Any = None
    # (states [M], tokens [M], values [M]): added to the logits
    bias: Any = None
    # (states [M], tokens [M]): tokens that may not stand before min_positions [num_states]
    stop_tokens: Any = None
    min_positions: Any = None
    # [num_states] float32 each; a repetition penalty of 1, others of 0 do nothing
    repetition_penalty: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    # [num_states, vocab_size] bool: tokens of the prompt, which count for the repetition penalty
    prompt_mask: Any = None
    # [num_states, vocab_size] int32: how often a token was emitted; drafts of this step not included
    output_counts: Any = None
    # (states [M], token ids [M, length], padded with -1 in front): the last token may not follow the others
    bad_words: Any = None
    # [num_states, length - 1]: the last tokens emitted, padded with -1 in front
    last_token_ids: Any = None

    @property
    def penalizes(self) -> bool:
        return self.output_counts is not None


def adjust(
    # [num_logits, vocab_size]
    logits: Any,
    # [num_reqs + 1], [num_logits], [num_logits], [num_reqs]: as for rejection_sample
    cu_num_logits: Any,
    draft_token_ids: Any,
    positions: Any,
    idx_mapping: Any,
    edits: Edits,
) -> Any:
    """Edited logits [num_logits, vocab_size] float32; a row counts the drafts before it as emitted.

    >>> import torch
    >>> logits, drafts = torch.zeros(2, 3), torch.tensor([0, 2])
    >>> edits = Edits(output_counts=torch.tensor([[1, 0, 0]]), presence_penalty=torch.tensor([0.5]))
    >>> adjust(logits, torch.tensor([0, 2]), drafts, torch.tensor([7, 8]), torch.tensor([0]), edits)
    tensor([[-0.5000,  0.0000,  0.0000],
            [-0.5000,  0.0000, -0.5000]])
    """
    module = import_module(".reference", __name__)
    return module.adjust(logits, cu_num_logits, draft_token_ids, positions, idx_mapping, edits)
