"""Verifies draft tokens: modified rejection sampling over ragged batches, with all sampling parameters. Penalties and
other edits of the logits come first (adjust/). Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding"; Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling". num_logits: rows of
all requests, num_states: rows of the per-request arrays."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..implementations import implementation_of, module_of


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters by request state; None for a parameter that no request of the batch uses."""

    # [num_states] float32, 0: argmax
    temperature: Any
    # [num_states] int64
    seeds: Any
    # [num_states] int32; below 1, or vocab_size and more: all tokens
    top_k: Any = None
    # [num_states] float32 in (0, 1]
    top_p: Any = None
    # [num_states] float32 in [0, 1]
    min_p: Any = None

    @property
    def truncates(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    def at(self, index: Any) -> "Sampling":
        chosen = (None if field is None else field[index] for field in vars(self).values())
        return Sampling(*chosen)


class Layout(NamedTuple):
    """The layout of the logits' rows: arguments of `rejection_sample`; `sample_step` takes the last three."""

    cu_num_logits: Any
    draft_token_ids: Any
    positions: Any
    idx_mapping: Any
    logits_indices: Any = None
    seq_lens: Any = None
    prefill_len: Any = None


def rejection_sample(
    # [num_logits, vocab_size] bfloat16, float16 or float32; the rows of a request are contiguous
    target_logits: Any,
    # [num_reqs + 1] int32: request r has the rows cu_num_logits[r] to cu_num_logits[r + 1], maybe none
    cu_num_logits: Any,
    # [num_logits] integer: the token that each row reads; a request's first is ignored, -1 is always rejected
    draft_token_ids: Any,
    # [num_logits] int64: the position of the token that the row predicts, after the token that it reads
    positions: Any,
    # [num_reqs] integer: the request's row in the arrays of `sampling` and in draft_logits
    idx_mapping: Any,
    sampling: Sampling,
    max_num_draft: int,
    # [num_states, >= max_num_draft, draft_vocab_size] floating: logits of q, before temperature; None: q is one-hot.
    # Tokens from draft_vocab_size on have q = 0
    draft_logits: Any = None,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Returns each request's accepted drafts and one more token: a recovered one after a rejection, else the bonus
    token.

    The tokens follow the target's distribution after temperature, min-p, top-k and top-p, in this order. They do not
    depend on the rest of the batch. With a one-hot q, only their number depends on the drafts. NaN logits count as
    -inf, +inf as the largest float32; a row of -inf alone gives token 0. Temperature 0 gives the first argmax. If draft
    logits form no distribution (NaN, +inf, or -inf alone), the draft is rejected and the next token is drawn from p.

    Args:
        implementation: "reference", "host" (one-hot q on a CPU) or "fused"; None: the fastest available.

    Returns:
        sampled [num_reqs, max_num_draft + 1] int64, padded with -1, and num_sampled [num_reqs] int32.

    Raises:
        ValueError: the shape of draft_logits or the implementation does not fit.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0]])
    >>> sampling = Sampling(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    >>> rejection_sample(logits, torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([5, 6]), torch.tensor([0]),
    ...     sampling, max_num_draft=1)
    (tensor([[1, 0]]), tensor([2], dtype=torch.int32))
    """
    vocab_size = target_logits.shape[1]
    if draft_logits is not None and (draft_logits.shape[1] < max_num_draft or draft_logits.shape[2] > vocab_size):
        raise ValueError(
            f"draft_logits has shape {tuple(draft_logits.shape)}, but must have at least {max_num_draft} rows per "
            f"request of at most {vocab_size} tokens."
        )
    on_cpu = "host" if draft_logits is None or max_num_draft == 0 else "reference"
    layout = Layout(cu_num_logits, draft_token_ids, positions, idx_mapping)
    module = module_of(__name__, target_logits, implementation, on_cpu)
    sampled, num_sampled, *_ = module.rejection_sample(target_logits, layout, sampling, max_num_draft, draft_logits)
    return sampled, num_sampled


def sample_step(
    target_logits: Any,  # [num_logits, vocab_size]
    layout: Layout,
    sampling: Sampling,
    max_num_draft: int,
    implementation: str | None = None,
    operation: Any = None,
) -> tuple[Any, Any, Any]:
    """Runs `rejection_sample` with a one-hot q on a runner's step, and reads the step's arrays in place. On a GPU this
    takes two launches, which also gather the drafts and count the rejected ones.

    Returns the emitted tokens and the number of rejected drafts. Within its prompt a request has neither; at the end
    of its prompt it has no drafts yet, so their placeholders are rejected.

    Args:
        layout: `draft_token_ids` and `positions` [num_tokens] of all fed tokens, `logits_indices` [num_logits] of the
            rows among these, `seq_lens` [>= num_reqs] with the fed tokens, `prefill_len` [num_states] of the prompts.
        operation: replaces `rejection_sample`; takes its first seven arguments.

    Returns:
        sampled [num_reqs, max_num_draft + 1] int64, padded with -1, num_sampled and num_rejected [num_reqs] int32.

    >>> import torch
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
    from . import reference

    sample = operation or partial(rejection_sample, implementation=name)
    return reference.sample_step(target_logits, layout, sampling, max_num_draft, sample)
