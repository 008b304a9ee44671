"""The proposer around the index: batches, options, and requests that come and go."""

from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import PromptLookup

CONTEXT = ProposerContext(
    vocab_size=100,
    max_model_len=1000,
    max_num_reqs=4,
    max_num_draft=4,
    tokenize=lambda text: [ord(c) % 100 for c in text],
)


def lookup(**config: int) -> PromptLookup:
    return PromptLookup(PromptLookupConfig(**{"min_ngram": 2, "max_ngram": 4, **config}), CONTEXT)


def batch(requests: dict[str, list[int]], room: int = 4, **options: Any) -> DraftBatch:
    histories = [np.array(tokens, np.int32) for tokens in requests.values()]
    return DraftBatch(list(requests), histories, np.full(len(requests), room, np.int32), [options for _ in requests])


def drafts(proposer: PromptLookup, *args: Any, **kwargs: Any) -> list[list[int]]:
    draft = proposer.propose(batch(*args, **kwargs))
    return [tokens[:n].tolist() for tokens, n in zip(draft.token_ids, draft.num_draft, strict=True)]


def test_batch() -> None:
    """Kills: rows mixed up; a request without a match that gets a draft."""
    requests = {"a": [1, 2, 3, 4, 9, 1, 2], "b": [1, 2, 3], "c": [7, 7, 7]}
    assert drafts(lookup(), requests) == [[3, 4, 9, 1], [], [7, 7, 7, 7]]


def test_longest_then_most_recent() -> None:
    assert drafts(lookup(), {"a": [5, 1, 2, 30, 9, 1, 2, 40, 5, 1, 2]}, 1) == [[30]], "the longer match is older"
    assert drafts(lookup(), {"a": [8, 1, 2, 30, 9, 1, 2, 40, 5, 1, 2]}, 1) == [[40]], "equal lengths: the newer one"


def test_room() -> None:
    assert drafts(lookup(), {"a": [1, 2, 3, 4, 9, 1, 2]}, room=2) == [[3, 4]]
    assert drafts(lookup(), {"a": [1, 2, 3, 4, 9, 1, 2]}, room=0) == [[]]


def test_steps_extend_the_history() -> None:
    proposer = lookup()
    history = [1, 2, 3, 4, 9]
    assert drafts(proposer, {"a": history}) == [[]]
    assert drafts(proposer, {"a": [*history, 1, 2]}) == [[3, 4, 9, 1]]


def test_forgotten_requests_start_anew() -> None:
    """An id that comes back with another history, as after an abort; and one that was never known."""
    proposer = lookup()
    assert drafts(proposer, {"a": [1, 2, 3, 4, 9, 1, 2]}) != [[]]
    proposer.forget(["a", "never seen"])
    assert drafts(proposer, {"a": [5, 6, 7, 8, 9, 10, 11, 1, 2]}) == [[]]


def test_history_that_was_cut_is_indexed_anew() -> None:
    """Kills: an index that goes on after the engine took tokens back."""
    proposer = lookup()
    drafts(proposer, {"a": [1, 2, 3, 4, 9, 1, 2]})
    assert drafts(proposer, {"a": [1, 2, 3, 50, 1, 2]}) == [[3, 50, 1, 2]]


@pytest.mark.parametrize("reference", [[70, 71, 72, 73], "FGHI"])
def test_reference(reference: Any) -> None:
    """Token ids or text; only what follows the match, and nothing past the reference's end."""
    assert drafts(lookup(), {"a": [1, 70, 71]}, reference=reference) == [[72, 73]]


def test_history_wins_over_reference() -> None:
    assert drafts(lookup(), {"a": [70, 71, 5, 6, 70, 71]}, 1, reference=[70, 71, 72]) == [[5]]
