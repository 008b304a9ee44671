"""Prompt lookup for a batch: finds the longest match of each request's newest tokens in its text or reference, and
copies the tokens after it. Saxena 2023 (prompt lookup decoding); Yang et al. 2023 (references). Of equally long
matches, the one nearest to the copy position wins. The copy position moves on as if the target had replaced the
rejected tokens one by one since the last match. Its distance to the text's end is the only state between steps. No
operation waits, so a CUDA graph can record it. R: rows of the batch, S: slots of requests, L: longest text, K:
max_num_draft."""

from typing import Any, NamedTuple

from ..implementations import module_of

LONGEST_MATCH = 31  # a longer match counts as this long
NO_MATCH = 1 << 30  # distance without an earlier match; the earliest of equal matches is then nearest


# Tokens, lengths of drafts and lengths of matches, as history_match returns them.
Match = tuple[Any, Any, Any]


class Texts(NamedTuple):
    """The requests' tokens.

    Args:
        token_ids: [S, L] int32, not negative.
        lengths: [S] int32.
        distances: [S, 2] int32, from the place after the last match to the text's end, in the text and in the
            reference; NO_MATCH at first. Each match writes it.
    """

    token_ids: Any
    lengths: Any
    distances: Any


class References(NamedTuple):
    """Further texts to search; slots may share one.

    Args:
        token_ids: [P] int32, all references; P is a multiple of 16.
        starts, lengths: [S] int64, multiples of 16, and [S] int32, at most L; length 0: no reference.
    """

    token_ids: Any
    starts: Any
    lengths: Any


def history_match(
    texts: Texts,
    # [R] int32 or int64, the slot of each row
    slots: Any,
    # [R] int32, 0..K tokens; a row with 0 is not read
    limits: Any,
    max_num_draft: int,
    min_ngram: int,
    max_ngram: int,
    references: References | None = None,
    longest: int | None = None,
    implementation: str | None = None,
) -> Match:
    """Drafts the tokens after the longest earlier match of the last tokens; of equally long matches the nearest wins. A
    match in the reference must be longer than one in the text. Of two equally near matches the earlier wins. If fewer
    than its limit follow a match in the text, the copy repeats itself, as in LZ77.

    Returns drafts [R, K] int32, padded with 0; their lengths [R] int32, the limits, or fewer where a reference ends;
    and the lengths of the matches [R] int32, at most LONGEST_MATCH. Without a match both lengths are 0.

    Args:
        min_ngram: shortest match; at the copy position one token is enough.
        max_ngram: longer matches count as equally long; 1 <= min_ngram <= max_ngram <= 16.
        longest: upper bound of the tokens in a text or reference of these rows; None: L.
        implementation: "reference" (on a CPU) or "fused"; None: fused on a GPU, the reference on a CPU.

    >>> import torch
    >>> tokens = torch.tensor([[1, 2, 3, 4, 1, 2, 0, 0]], dtype=torch.int32)
    >>> texts = Texts(tokens, torch.tensor([6], dtype=torch.int32), torch.full((1, 2), NO_MATCH, dtype=torch.int32))
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> history_match(texts, one, torch.tensor([3], dtype=torch.int32), 4, min_ngram=2, max_ngram=4)[0].tolist()
    [[3, 4, 1, 0]]
    """
    module = module_of(__name__, texts.token_ids, implementation)
    return module.history_match(texts, slots, limits, max_num_draft, min_ngram, max_ngram, references, longest)
