"""Prompt lookup for a whole batch, where its tokens lie: the longest match of each request's newest tokens in its own
text or in its reference, and what followed there.

Among equally long matches the one is taken that is nearest to where copying would have gone on: had the target put as
many tokens in the place of those that it rejected, as far back as the last match. That distance is all that is kept
between steps; every text is read once a step. Saxena 2023 (prompt lookup decoding); Yang et al. 2023 (references).

Front door: `history_match` picks the implementation. It waits for nothing, so a CUDA graph can record it. `host.py`
does the same for texts in the host's memory, also after tokens that another stage drafted. R: rows of the batch, S:
slots of requests, L: longest text, K: most tokens of a draft.
"""

from typing import Any, NamedTuple

from ..implementations import module_of

LARGEST_N = 16  # of an n-gram that is searched for
LONGEST_MATCH = 31  # a match's length is counted so far
NO_MATCH = 1 << 30  # the distance of a request that nothing was found for; of equals the earliest is then nearest


class Texts(NamedTuple):
    """The requests' tokens.

    Args:
        token_ids: [S, L] int32, not negative.
        lengths: [S] int32, how many of them there are.
        distances: [S, 2] int32, how many tokens before the end the last match went on, in the own text and in the
            reference; NO_MATCH at first. Each match is written there.
    """

    token_ids: Any
    lengths: Any
    distances: Any


class References(NamedTuple):
    """Other texts to be searched, one or none for each slot; slots may share one.

    Args:
        token_ids: [P] int32, all texts; P is a multiple of 16.
        starts: [S] int64, where a slot's text begins there: multiples of 16.
        lengths: [S] int32, at most L; 0: no text.
    """

    token_ids: Any
    starts: Any
    lengths: Any


class Match(NamedTuple):
    """What was found.

    Args:
        token_ids: [R, K] int32, 0 after a draft's end.
        num_draft: [R] int32, what was wanted, or less where a reference ends; 0 where nothing was found.
        match_length: [R] int32, tokens of the match, counted to 31; 0: none.
    """

    token_ids: Any
    num_draft: Any
    match_length: Any


def history_match(
    texts: Texts,
    # [R] int32 or int64, the slot of each row
    slots: Any,
    # [R] int32, 0..K tokens; of a row that wants none nothing is read
    max_draft: Any,
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None = None,
    longest: int | None = None,
    implementation: str | None = None,
) -> Match:
    """What followed the longest earlier match of the last tokens, the nearest one among equals.

    A reference's match must be longer than the text's own. Of two that are as near the earlier one is taken. A copy
    from the own text repeats itself where fewer tokens follow the match than are wanted, as in LZ77; one from a
    reference ends where that ends.

    Args:
        max_num_draft: K.
        min_ngram: fewest tokens of a match; of one that is where copying would go on, one.
        max_ngram: matches of as many tokens or more count as equally long; 1 <= min_ngram <= max_ngram <= 16.
        longest: no text of these rows, and no reference, has more tokens; None: as many as there is room for.
        implementation: "reference" or "fused"; None: fused on a GPU, else the reference.

    Raises:
        ValueError: no such implementation, or n-grams of another length.

    >>> import torch
    >>> tokens = torch.tensor([[1, 2, 3, 4, 1, 2, 0, 0]], dtype=torch.int32)
    >>> texts = Texts(tokens, torch.tensor([6], dtype=torch.int32), torch.full((1, 2), NO_MATCH, dtype=torch.int32))
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> history_match(texts, one, torch.tensor([3], dtype=torch.int32), 4, min_ngram=2, max_ngram=4)[0].tolist()
    [[3, 4, 1, 0]]
    """
    if not 1 <= min_ngram <= max_ngram <= LARGEST_N:
        raise ValueError(f"min_ngram and max_ngram are {min_ngram} and {max_ngram}, but must be 1 to {LARGEST_N}.")
    module = module_of(__name__, texts.token_ids, implementation)
    match: Match = module.history_match(
        texts, slots, max_draft, max_num_draft, min_ngram, max_ngram, references, longest
    )
    return match
