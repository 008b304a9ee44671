"""What is done for each row of a step beside drafting, in one launch each: how much it may draft, and what is counted.

Nothing here waits, so a CUDA graph can record it. R: rows of the batch or of a graph, S: slots of requests, K: most
tokens of a draft, M: stages, two of them. A row of padding has slot S, which is nobody's, and has sampled nothing.
"""

from typing import Any, NamedTuple

from ..implementations import module_of

# Kinds of a stage's tokens, which are counted by place; and what is counted of a stage as a whole.
KINDS = VERIFIED, ACCEPTED, KEPT = range(3)
SUMS = ASKED, DRAFTED, DRAFTS, CONFIRMED = range(4)


class Rows(NamedTuple):
    """Of a step, [R] each: the slots, int64; tokens that were sampled, and drafted ones that were rejected, int32."""

    slots: Any
    num_sampled: Any
    num_rejected: Any


class Totals(NamedTuple):
    """What is added up, int64 each.

    Args:
        cells: requests by [1 + tokens verified, tokens that came out], K + 2 each; by [whether any was wanted, tokens
            drafted]; and where there are stages tokens [M, KINDS, K] and [M, SUMS].
        by_slot: [S + 1, 2] tokens verified and accepted.
        once: [>= 1] how much each row counts: 1, or 0 in a rehearsal.
    """

    cells: Any
    by_slot: Any
    once: Any


class Staged(NamedTuple):
    """What the stages of a cascade did.

    Args:
        num_sent, sent_stage: [S + 1] int32 and [S + 1, K] int32: the drafts before, by slot.
        num_sampled, num_rejected: [R] int32 each, what became of those.
        stage: [R, K] int, who drafted each token now.
        looked_up, exited: [R] int each, tokens of the two stages, -1 where one was not asked.
        confirmed: [R] int, of the first one's tokens those that the second would have drafted.
    """

    num_sent: Any
    sent_stage: Any
    num_sampled: Any
    num_rejected: Any
    stage: Any
    looked_up: Any
    exited: Any
    confirmed: Any


def limit(
    rows: Rows,
    # [S] int32, tokens of each slot's request
    lengths: Any,
    # [S, >= 3] int32 of each slot: most tokens of a draft, of the text before one, and of the text with its draft
    limits: Any,
    # [] int32: most tokens of any draft of this step
    most: Any,
    # [R] int32, written: each row's slot, -1 for nobody's
    mapping: Any,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """Slots [R] int64 of requests, any one for a row of padding, and how many tokens each row wants, [R] int32: none in
    the middle of a prompt.

    Args:
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.

    >>> import torch
    >>> rows = Rows(torch.tensor([1, 2]), torch.tensor([1, 0]), torch.tensor([0, 0]))
    >>> lengths, limits, mapping = torch.tensor([9, 7]), torch.tensor([[5, 99, 10], [5, 99, 10]]), torch.zeros(2).int()
    >>> [found.tolist() for found in limit(rows, lengths, limits, torch.tensor(4), mapping)], mapping.tolist()
    ([[1, 1], [3, 0]], [1, -1])
    """
    result: tuple[Any, Any] = _module(lengths, implementation).limit(rows, lengths, limits, most, mapping)
    return result


def tally(
    totals: Totals,
    rows: Rows,
    # [R] int32 each: how many tokens each row wanted, and got
    wanted: Any,
    num_draft: Any,
    max_num_draft: int,
    staged: Staged | None = None,
    implementation: str | None = None,
) -> None:
    """Counts new drafts, and what became of the last ones.

    Args:
        max_num_draft: K.
        staged: None: stages are not told apart.
        implementation: see `limit`.
    """
    _module(totals.cells, implementation).tally(totals, rows, wanted, num_draft, max_num_draft, staged)


def _module(array: Any, implementation: str | None) -> Any:
    return module_of(__name__, array, implementation)
