"""The proposer around the index: batches, options, and requests that come and go."""

from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers import prompt_lookup
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


def test_reference() -> None:
    """Only what follows the match, and nothing past the reference's end."""
    assert drafts(lookup(), {"a": [1, 70, 71]}, reference=[70, 71, 72, 73]) == [[72, 73]]


def test_history_wins_over_reference() -> None:
    assert drafts(lookup(), {"a": [70, 71, 5, 6, 70, 71]}, 1, reference=[70, 71, 72]) == [[5]]


def test_a_reference_is_indexed_once() -> None:
    """Requests with equal references share one index, which goes with the last of them. Kills: an index for each, one
    that stays, and one that goes too soon."""
    proposer = lookup()
    text = list(range(10, 90))
    requests = {name: [1, 20, 21] for name in "abc"}
    assert drafts(proposer, requests, reference=text) == [[22, 23, 24, 25]] * 3
    assert len(proposer._references) == 1
    assert drafts(proposer, {"d": [1, 20, 21]}, reference=text[1:]) == [[22, 23, 24, 25]]
    assert len(proposer._references) == 2
    proposer.forget(["a", "d"])
    proposer.forget(["b", "b"])
    assert len(proposer._references) == 1
    assert drafts(proposer, {"c": [1, 20, 21, 5, 30, 31]}, reference=text) == [[32, 33, 34, 35]]
    proposer.forget(["c"])
    assert not proposer._references and not proposer._requests
    assert proposer._allowance.num_bytes == 0


LONG = np.random.default_rng(0).integers(0, 100, 20_000).tolist()


def test_long_texts_wait_and_others_do_not() -> None:
    """Of a burst of long prompts and references each step takes in a part, the shortest rest first; a request that
    decodes is drafted for meanwhile, and the others in the end, as if all had been taken in at once.

    Kills: a step that takes in all, a share for each long prompt, a draft from a part of a history.
    """
    proposer, at_once = lookup(), lookup()
    short = [1, 2, 3, 4, 9, 1, 2]
    requests = {
        "long": [*LONG, 1, 2],
        "short": short,
        "shorter": [*LONG[:9000], 1, 2],
        "referring": [7, 60, 50, 60, 50],
    }
    reference = [60, 50, 60, 50, 1, *LONG, 60, 50, 60, 50, 2]  # its end decides
    options: list[dict[str, Any]] = [{}, {}, {}, {"reference": reference}]

    def step(proposer: PromptLookup) -> list[list[int]]:
        histories = [np.array(tokens, np.int32) for tokens in requests.values()]
        draft = proposer.propose(DraftBatch(list(requests), histories, np.full(4, 4, np.int32), options))
        return [tokens[:n].tolist() for tokens, n in zip(draft.token_ids, draft.num_draft, strict=True)]

    steps = [step(proposer) for _ in range(60)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_lookup, "SHARED_WORK", 1 << 40)
        expected = step(at_once)
    assert all(found[1] == [3, 4, 9, 1] for found in steps)
    first = [next(number for number, found in enumerate(steps) if found[row]) for row in range(4)]
    assert first[0] > first[2] > 1 < first[3]
    assert steps[-1] == expected
    for row in range(4):
        assert all(found[row] == expected[row] for found in steps[first[row] :])


def test_full_memory() -> None:
    """A request whose index finds no room is not drafted for, gives back what it held, and holds up nobody.

    Kills: a bound for each request, bytes that are not given back, and half-built indexes that wait for each other.
    """
    proposer = lookup(max_index_bytes=1 << 20)
    requests = {name: [*LONG, 1, 2] for name in "abcdefgh"}
    for _ in range(200):
        found = drafts(proposer, requests)
        held = [request.index.num_bytes for request in proposer._requests.values()]
        assert sum(held) == proposer._allowance.num_bytes <= 1 << 20
    ready = [name for name, draft in zip(requests, found, strict=True) if draft]
    assert ready == list(proposer._requests) and 0 < len(ready) < 8
    proposer.forget(ready)
    assert proposer._allowance.num_bytes == 0
    for _ in range(100):
        found = drafts(proposer, {"new": requests["a"]})
    assert found != [[]]


@pytest.mark.parametrize("bad", [[1, 2, -1, 4, 1, 2], [-1, 1]])
def test_a_fault_in_one_requests_data(bad: list[int]) -> None:
    """Costs that request its drafts, and nobody else. Kills: an exception that leaves propose or continue_draft, and a
    request that is tried again at every step."""
    proposer = lookup()
    requests = {"a": [1, 2, 3, 4, 9, 1, 2], "bad": bad, "c": [7, 7, 7]}
    for _ in range(3):
        assert drafts(proposer, requests) == [[3, 4, 9, 1], [], [7, 7, 7, 7]]
    again = batch(requests)
    assert proposer.continue_draft(again, 1, [], 4)[0].tolist() == []
    assert proposer.continue_draft(again, 0, [3], 3)[0].tolist() == [4, 9, 1]
    assert set(proposer._requests) == {"a", "c"}
    proposer.forget(["bad"])
    assert drafts(proposer, {"bad": [1, 2, 3, 1, 2]}) == [[3, 1, 2, 3]]
    bad_reference = {"a": [1, 2, 3, 4, 9, 1, 2], "c": [7, 7, 7]}
    assert drafts(proposer, bad_reference, reference=[5, -1, 6])[0] == [3, 4, 9, 1]


def test_continued_drafts() -> None:
    """A begun draft stands behind the history, and is not remembered."""
    proposer = lookup()
    now = batch({"a": [1, 2, 3, 4, 9, 1, 2]})
    assert proposer.continue_draft(now, 0, [3], 2)[0].tolist() == [4, 9]
    assert proposer.continue_draft(now, 0, [3, 4, 9], 9)[0].tolist() == [1, 2, 3, 4, 9, 1, 2, 3, 4]
    assert proposer.continue_draft(now, 0, [50, 51], 2)[0].tolist() == []
    assert proposer.continue_draft(now, 0, [50, 51, 8, 50, 51], 2)[0].tolist() == []
