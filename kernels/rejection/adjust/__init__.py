"""Edits logits before verification, exactly at every position: allowed tokens, biases, minimum lengths, penalties and
bad words. `Edits` holds the arrays by request state that vLLM's Model Runner V2 stores on the device, so a step
converts nothing. The order is vLLM's: bias, then repetition, frequency and presence penalties. A forbidden token gets
-inf. num_logits, num_states: as in rejection/."""

from typing import Any, NamedTuple

from ...implementations import module_of
from .. import Layout


class Allowed(NamedTuple):
    """Forbids all other tokens if the list is not empty."""

    # [num_states] int32: lengths of the lists
    num_tokens: Any
    # [num_states, max_num_tokens] int32
    token_ids: Any


class Bias(NamedTuple):
    """Adds to the logits; each token appears once in its list."""

    # As of Allowed
    num_tokens: Any
    token_ids: Any
    # [num_states, max_num_tokens] float32
    values: Any


class MinTokens(NamedTuple):
    """Forbids tokens before a position."""

    # As of Allowed
    num_tokens: Any
    token_ids: Any
    # [num_states] int32
    min_positions: Any


class Penalties(NamedTuple):
    """A repetition penalty of 1 and other penalties of 0 have no effect."""

    # [num_states] float32 each
    repetition: Any
    frequency: Any
    presence: Any
    # [num_states, ceil(vocab_size / 32)] int32, bit t % 32 of word t // 32: tokens of the prompt, for the repetition
    # penalty
    prompt_mask: Any
    # [num_states, vocab_size] int32: emitted tokens, without drafts of this step
    output_counts: Any


class BadWords(NamedTuple):
    """Forbids the last token of a word after its other tokens."""

    # [num_states] int32
    num_words: Any
    # [num_states, max_num_words + 1] int32: word w has the token ids offsets[w] to offsets[w + 1], at least one
    offsets: Any
    # [num_states, max_num_tokens] int32
    token_ids: Any
    # [num_states, max_length] int32: prompt and output, without drafts of this step
    history: Any
    # [num_states] int32: words are matched after the prompt only
    prompt_lengths: Any


class Edits(NamedTuple):
    """None and empty lists make no edit."""

    allowed: Allowed | None = None
    bias: Bias | None = None
    min_tokens: MinTokens | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None


def adjust(
    # [num_logits, vocab_size] bfloat16, float16 or float32; [num_reqs, vocab_size] of each request's last row alone
    logits: Any,
    # [num_reqs + 1], [num_logits], [num_logits], [num_reqs]: as for rejection_sample
    cu_num_logits: Any,
    draft_token_ids: Any,
    positions: Any,
    idx_mapping: Any,
    edits: Edits,
    max_num_draft: int,
    implementation: str | None = None,
    *,
    only_last: bool = False,
) -> Any:
    """Returns edited logits, float32 of the shape of `logits`; each row counts the drafts before it as emitted. With
    `only_last`, as during drafting, `logits` holds only the last row of each request. `implementation`: "reference" or
    "fused", else a ValueError; None: fused on a GPU, else the reference.

    >>> import torch
    >>> logits, drafts = torch.zeros(2, 3), torch.tensor([0, 2])
    >>> edits = Edits(bias=Bias(torch.tensor([1]), torch.tensor([[2]]), torch.tensor([[0.5]])))
    >>> adjust(logits, torch.tensor([0, 2]), drafts, torch.tensor([7, 8]), torch.tensor([0]), edits, max_num_draft=1)
    tensor([[0.0000, 0.0000, 0.5000],
            [0.0000, 0.0000, 0.5000]])
    """
    module = module_of(__name__, logits, implementation)
    layout = Layout(cu_num_logits, draft_token_ids, positions, idx_mapping)
    return module.adjust(logits, layout, edits, max_num_draft, only_last)
