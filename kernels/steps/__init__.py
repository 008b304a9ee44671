"""What is done for each row of a step beside drafting, in one launch each: how much it may draft, what drafting begins
with, how drafts of two stages become one, and what is counted.

Nothing here waits, so a CUDA graph can record it. R: rows of the batch or of a graph, S: slots of requests, K: most
tokens of a draft, M: stages, two of them. A row of padding has slot S, which is nobody's, and has sampled nothing.
"""

from typing import Any, NamedTuple

from ..implementations import module_of

# Kinds of a stage's tokens, which are counted by place; and what is counted of a stage as a whole.
KINDS = VERIFIED, ACCEPTED, KEPT = range(3)
SUMS = ASKED, DRAFTED, DRAFTS, CONFIRMED = range(4)
# How a second stage's tokens meet a first one's: they stand after them, stand where there are none, or are compared.
RULES = AFTER, INSTEAD, COMPARED = range(3)
LARGEST_PROB = 1 - 1e-6  # of a token that both stages draft; from 1 on a confidence is a match's length


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


class Wanted(NamedTuple):
    """How much the rows draft.

    Args:
        slots: [R] int64, of requests, any one for a row of padding.
        num_tokens: [R] int32: none in the middle of a prompt.
        of_stages: the same for each stage of a cascade: 0 where a request does not allow it; () without stages.
    """

    slots: Any
    num_tokens: Any
    of_stages: tuple[Any, ...] = ()


class Chain(NamedTuple):
    """One stage's tokens.

    Args:
        token_ids: [R, any number] int32.
        num_draft: [R] int32, how many of these make its draft.
        confidence: as token_ids, a probability below 1 or a match's length, int or float; None: 1, 2, 3, ...
    """

    token_ids: Any
    num_draft: Any
    confidence: Any


class Joined(NamedTuple):
    """One draft of two stages.

    Args:
        token_ids, stage: [R, K] int32.
        num_draft: [R] int32.
        confidence: [R, K] float32.
        exited: [R] int32, tokens that the second stage drafted, -1 where it was not asked.
        confirmed: [R] int32, tokens of the first one that the second would have drafted, where it compares.
    """

    token_ids: Any
    num_draft: Any
    stage: Any
    confidence: Any
    exited: Any
    confirmed: Any


def limit(
    rows: Rows,
    # [S] int32, tokens of each slot's request
    lengths: Any,
    # [S, >= 3] int32 of each slot: most tokens of a draft, of the text before one, and of the text with its draft; then
    # whether each of two stages is allowed, 1 or 0
    limits: Any,
    # [] int32: most tokens of any draft of this step
    most: Any,
    # [R] int32, written: each row's slot, -1 for nobody's
    mapping: Any,
    of_stages: tuple[int, ...] = (),
    implementation: str | None = None,
) -> Wanted:
    """How many tokens each row wants.

    Args:
        of_stages: most tokens of each of two stages.
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.

    >>> import torch
    >>> rows = Rows(torch.tensor([1, 2]), torch.tensor([1, 0]), torch.tensor([0, 0]))
    >>> lengths, limits, mapping = torch.tensor([9, 7]), torch.tensor([[5, 99, 10], [5, 99, 10]]), torch.zeros(2).int()
    >>> [found.tolist() for found in limit(rows, lengths, limits, torch.tensor(4), mapping)[:2]], mapping.tolist()
    ([[1, 1], [3, 0]], [1, -1])
    """
    result: Wanted = _module(lengths, implementation).limit(rows, lengths, limits, most, mapping, of_stages)
    return result


def newest(
    # [R] int32, slots; -1 for nobody's rows, which are of no tokens
    mapping: Any,
    # [S] int32, tokens before each slot's newest one
    num_computed: Any,
    # [S] int64, the newest ones
    last_sampled: Any,
    # [S] each, of any types
    tables: tuple[Any, ...],
    implementation: str | None = None,
) -> tuple[Any, ...]:
    """What drafting begins with, [R] each: the newest tokens, int32; the texts' lengths, int64; the slots' entries in
    the tables.

    >>> import torch
    >>> found = newest(torch.tensor([1, -1]), torch.tensor([3, 8]), torch.tensor([5, 6]), (torch.tensor([0.0, 0.5]),))
    >>> [own.tolist() for own in found]
    [[6, 5], [9, 0], [0.5, 0.0]]
    """
    result: tuple[Any, ...] = _module(mapping, implementation).newest(mapping, num_computed, last_sampled, tables)
    return result


def join(first: Chain, second: Chain, rule: int, adds: bool = False, implementation: str | None = None) -> Joined:
    """One draft of a first stage's, [R, K], and a second's, which may have fewer columns.

    Args:
        rule: AFTER: the second one's begin with as many of the first one's, which stay. INSTEAD: they are taken where
            the first stage has none. COMPARED: they are taken wherever the second stage was asked.
        adds: of COMPARED, whether a token that both draft has probability 1 - (1 - p) / n^2, where the second stage's
            is p and the first one's match has n tokens.

    >>> import torch
    >>> first, second = (torch.tensor([tokens], dtype=torch.int32) for tokens in ([7, 8, 0], [7, 5, 6]))
    >>> chains = Chain(first, torch.tensor([2]), torch.ones(1, 3)), Chain(second, torch.tensor([3]), None)
    >>> [join(*chains, rule)[0].tolist() for rule in RULES]
    [[[7, 8, 6]], [[7, 8, 0]], [[7, 5, 6]]]
    """
    result: Joined = _module(first.token_ids, implementation).join(first, second, rule, adds)
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
