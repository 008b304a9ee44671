"""Runs the per-row work of a step other than drafting, in one launch per operation. No operation waits, so a CUDA graph
can record it. R: rows of the batch or of a graph, S: slots of requests, K: max tokens of a draft, M: stages, two of
them. A padding row has slot S, which belongs to no request, and has sampled nothing."""

from typing import Any, NamedTuple

from ..implementations import module_of

# A stage's tokens are counted by place in these kinds, and by these sums as a whole.
KINDS = VERIFIED, ACCEPTED, KEPT = range(3)
SUMS = ASKED, DRAFTED, DRAFTS, CONFIRMED = range(4)


class Rows(NamedTuple):
    """The rows of a step, [R] each: slots int64, numbers of sampled tokens and of rejected draft tokens int32."""

    slots: Any
    num_sampled: Any
    num_rejected: Any


class Totals(NamedTuple):
    """The sums, int64 each.

    Args:
        cells: requests by [1 + verified tokens, emitted tokens], K + 2 each; requests by [whether a draft was wanted,
            drafted tokens]; and with stages tokens [M, KINDS, K] and [M, SUMS].
        by_slot: [S + 1, 2] verified and accepted tokens.
        once: [>= 1] the weight of each row: 1, or 0 in a rehearsal.
    """

    cells: Any
    by_slot: Any
    once: Any


class Staged(NamedTuple):
    """The drafts of the stages of a cascade.

    Args:
        num_sent, sent_stage: [S + 1] int32 and [S + 1, K] int32: the last drafts, by slot.
        num_sampled, num_rejected: [R] int32 each, the outcome of those drafts.
        stage: [R, K] int, the stage of each new draft token.
        looked_up, num_second: [R] int each, tokens of the two stages, -1 if a stage was not asked.
        confirmed: [R] int, tokens of the first stage that the second would also have drafted; None: no comparison.
    """

    num_sent: Any
    sent_stage: Any
    num_sampled: Any
    num_rejected: Any
    stage: Any
    looked_up: Any
    num_second: Any
    confirmed: Any = None


class Wanted(NamedTuple):
    """Slots of the rows [R] int64 (arbitrary for padding); the number of tokens that each row drafts, [R] int32, 0
    within a prompt; and the number for each stage of a cascade, 0 if a request does not allow the stage."""

    slots: Any
    num_tokens: Any
    of_stages: tuple[Any, ...] = ()


def limit(
    rows: Rows,
    # [S] int32, tokens of each slot's request
    lengths: Any,
    # [S, >= 3] int32 of each slot: the largest length of a draft, of the text before one, and of the text with its
    # draft; then whether each of two stages is allowed, 1 or 0
    limits: Any,
    # [] int32: max tokens of a draft of this step
    step_limit: Any,
    # [R] int32, written: each row's slot, -1 for a row of padding
    mapping: Any,
    of_stages: tuple[int, ...] = (),
    implementation: str | None = None,
) -> Wanted:
    """Computes the number of tokens that each row wants; `of_stages` holds the limits of two stages. `implementation`,
    here and below: "reference" or "fused"; None: fused on a GPU, else the reference.

    >>> import torch
    >>> rows = Rows(torch.tensor([1, 2]), torch.tensor([1, 0]), torch.tensor([0, 0]))
    >>> lengths, limits, mapping = torch.tensor([9, 7]), torch.tensor([[5, 99, 10], [5, 99, 10]]), torch.zeros(2).int()
    >>> [part.tolist() for part in limit(rows, lengths, limits, torch.tensor(4), mapping)[:2]], mapping.tolist()
    ([[1, 1], [3, 0]], [1, -1])
    """
    return module_of(__name__, lengths, implementation).limit(rows, lengths, limits, step_limit, mapping, of_stages)


def newest(
    # [R] int32, slots; -1 for rows of padding, whose texts are empty
    mapping: Any,
    # [S] int32, tokens before each slot's newest one
    num_computed: Any,
    # [S] int64, the newest ones
    last_sampled: Any,
    # [S] each, of any types
    tables: tuple[Any, ...],
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """Returns the newest tokens (int32), the lengths of the texts (int64) and the slots' table entries, [R] each.

    >>> import torch
    >>> read = newest(torch.tensor([1, -1]), torch.tensor([3, 8]), torch.tensor([5, 6]), (torch.tensor([0.0, 0.5]),))
    >>> [part.tolist() for part in read]
    [[6, 5], [9, 0], [0.5, 0.0]]
    """
    return module_of(__name__, mapping, implementation).newest(mapping, num_computed, last_sampled, tables)


def join(
    first: tuple[Any, Any, Any], second: tuple[Any, Any, Any], continues: bool, implementation: str | None = None
) -> tuple[Any, Any, Any, Any, Any]:
    """Makes one draft of two stages' tokens [R, any number] int32, of which the second may have fewer columns, the
    lengths of their drafts, [R] int32, and their confidence: a probability below 1 or the length of a match, int or
    float; the second's may be None: 1, 2, 3, ... If `continues`, the second stage's drafts begin with the first stage's
    tokens, and the rest is appended. Otherwise they are used only if the first stage has no draft.

    Returns the tokens [R, K] int32, lengths [R] int32, the tokens' stages [R, K] int32, confidence [R, K] float32, and
    the number of the second stage's tokens, [R] int32, -1 if it has none.

    >>> import torch
    >>> first, second = (torch.tensor([tokens], dtype=torch.int32) for tokens in ([7, 8, 0], [7, 5, 6]))
    >>> drafts = (first, torch.tensor([2]), torch.ones(1, 3)), (second, torch.tensor([3]), None)
    >>> [join(*drafts, continues)[0].tolist() for continues in (True, False)]
    [[[7, 8, 6]], [[7, 8, 0]]]
    """
    return module_of(__name__, first[0], implementation).join(first, second, continues)


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
    """Counts new drafts and the outcome of the last ones; without `staged` there is no cascade."""
    module_of(__name__, totals.cells, implementation).tally(totals, rows, wanted, num_draft, max_num_draft, staged)
