"""The proposer around the search: batches, options, and requests that come and go."""

from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.structures.drafts import of_stage

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


def continued(proposer: PromptLookup, now: DraftBatch, row: int, prefix: list[int], most: int) -> list[int]:
    """Returns the tokens after one request's draft; no other request wants a draft."""
    tokens, num_begun = np.full((now.num_reqs, 5), 3, np.int32), np.zeros(now.num_reqs, np.int64)
    tokens[row, : len(prefix)], num_begun[row] = prefix, len(prefix)
    max_draft = np.where(np.arange(now.num_reqs) == row, most, 0)
    drafts = proposer.draft(now, of_stage(0, tokens, num_begun, np.ones(now.num_reqs)), max_draft)
    assert drafts.num_draft.sum() == drafts.num_draft[row]
    continuation: list[int] = drafts.token_ids[row, : drafts.num_draft[row]].tolist()
    return continuation


def test_batch() -> None:
    """Kills: rows mixed up; a request without a match that gets a draft."""
    requests = {"a": [1, 2, 3, 4, 9, 1, 2], "b": [1, 2, 3], "c": [7, 7, 7]}
    assert drafts(lookup(), requests) == [[3, 4, 9, 1], [], [7, 7, 7, 7]]


def test_longest_then_nearest() -> None:
    """Kills: the latest, or the earliest, of equally long matches; what is remembered of another request."""
    assert drafts(lookup(), {"a": [5, 1, 2, 30, 9, 1, 2, 40, 5, 1, 2]}, 1) == [[30]]
    assert drafts(lookup(), {"a": [9, 1, 2, 30, 5, 1, 2, 40, 5, 1, 2]}, 1) == [[40]]
    lines = [8, 1, 2, 30, 1, 2, 40, 1, 2, 50]  # a line is copied, with another end
    proposer, begin = lookup(), [*lines, 9, 2, 40, 60]
    assert drafts(proposer, {"a": begin[:-1], "b": [1, 7]}, 2) == [[1, 2], []]
    assert drafts(proposer, {"a": [*begin, 1, 2], "b": [*lines, 1, 2]}, 1) == [[50], [30]]
    proposer.forget(["a"])
    assert drafts(proposer, {"a": [*begin, 1, 2]}, 1) == [[30]], "as after a preemption"


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


def test_history_that_was_cut() -> None:
    """Kills: a text that is remembered after the engine took tokens back."""
    proposer = lookup()
    drafts(proposer, {"a": [1, 2, 3, 4, 9, 1, 2]})
    assert drafts(proposer, {"a": [1, 2, 3, 50, 1, 2]}) == [[3, 50, 1, 2]]


def test_reference() -> None:
    """Only what follows the match, and nothing past the reference's end."""
    assert drafts(lookup(), {"a": [1, 70, 71]}, reference=[70, 71, 72, 73]) == [[72, 73]]


def test_history_wins_over_reference() -> None:
    assert drafts(lookup(), {"a": [70, 71, 5, 6, 70, 71]}, 1, reference=[70, 71, 72]) == [[5]]


def test_references_go_with_their_requests() -> None:
    """Kills: a reference that stays, and one that another request's row inherits."""
    proposer = lookup()
    text = list(range(10, 90))
    assert drafts(proposer, {name: [1, 20, 21] for name in "abc"}, reference=text) == [[22, 23, 24, 25]] * 3
    assert proposer.num_bytes() == 3 * 4 * 80
    proposer.forget(["a", "b", "c", "c"])
    assert proposer.num_bytes() == 0
    assert drafts(proposer, {name: [1, 20, 21] for name in "def"}) == [[]] * 3


@pytest.mark.parametrize("bad", [[1, 2, -1, 4, 1, 2], [-1, 1, -1, 1]])
def test_a_fault_in_one_requests_data(bad: list[int]) -> None:
    """The fault costs only that request its drafts. Fails if a draft has an invalid token."""
    proposer = lookup()
    requests = {"a": [1, 2, 3, 4, 9, 1, 2], "bad": bad, "c": [7, 7, 7]}
    for _ in range(3):
        assert drafts(proposer, requests) == [[3, 4, 9, 1], [], [7, 7, 7, 7]]
    assert continued(proposer, batch(requests), 0, [3], 3) == [4, 9, 1]
    proposer.forget(["bad"])
    assert drafts(proposer, {"bad": [1, 2, 3, 1, 2]}) == [[3, 1, 2, 3]]
    bad_reference = {"a": [1, 2, 3, 4, 9, 1, 2], "c": [7, 7, 7]}
    assert drafts(proposer, bad_reference, reference=[5, -1, 6])[0] == [3, 4, 9, 1]


def test_continued_drafts() -> None:
    """A draft to continue follows the history, and is not stored."""
    proposer = lookup()
    now = batch({"a": [1, 2, 3, 4, 9, 1, 2]})
    assert continued(proposer, now, 0, [3], 2) == [4, 9]
    assert continued(proposer, now, 0, [3, 4, 9], 9) == [1, 2, 3, 4], "as many as there may be"
    assert continued(proposer, now, 0, [50, 51], 2) == []
    assert continued(proposer, now, 0, [50, 51, 8, 50, 51], 2) == []
