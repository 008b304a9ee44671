"""The proposer around the index: batches, options, and requests that come and go."""

from typing import Any

import numpy as np
import pytest

from vllm_specplugins.config import PromptLookupConfig
from vllm_specplugins.draft import DraftBatch, ProposerContext
from vllm_specplugins.proposers import prompt_lookup
from vllm_specplugins.proposers.prompt_lookup import PromptLookup
from vllm_specplugins.structures import ngram_index
from vllm_specplugins.structures.allowance import ASKING, OWN_MEMORY_FROM, Allowance
from vllm_specplugins.structures.ngram_table import BLOCK, CLEARING, MOVED_PER_WORK, NEXT, NUM_CLEARED, NUM_MOVED

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


def continued(proposer: PromptLookup, now: DraftBatch, row: int, begun: list[int], most: int) -> list[int]:
    """What follows one request's draft; nobody else wants any."""
    tokens, num_begun = np.full((now.num_reqs, 5), 3, np.int32), np.zeros(now.num_reqs, np.int64)
    tokens[row, : len(begun)], num_begun[row] = begun, len(begun)
    wanted = np.where(np.arange(now.num_reqs) == row, most, 0)
    token_ids, num_draft, _ = proposer.continue_drafts(now, tokens, num_begun, wanted)
    assert num_draft.sum() == num_draft[row]
    found: list[int] = token_ids[row, : num_draft[row]].tolist()
    return found


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


def count_work(patch: pytest.MonkeyPatch) -> list[int]:
    """Work that indexes do from now on, counted by what it changes: tokens entered, slots cleared and moved, tables
    asked of the system for."""
    done: list[int] = []
    enter, move, make = ngram_index.enter_text, ngram_index.move, Allowance.make_table

    def entering(text: Any, table: Any, state: Any, work: int) -> Any:
        before = int(state[NEXT])
        result = enter(text, table, state, work)
        done.append(int(state[NEXT]) - before)
        return result

    def moving(table: Any, larger: Any, state: Any, work: int) -> Any:
        cleared, moved = state[[NUM_CLEARED, NUM_MOVED]].tolist()
        result = move(table, larger, state, work)
        done.append((int(state[NUM_CLEARED]) - cleared) * CLEARING // BLOCK)
        done.append(np.count_nonzero(table[moved : state[NUM_MOVED]]) // MOVED_PER_WORK)
        return result

    def making(self: Allowance, num_slots: int) -> Any:
        done.append(ASKING if 8 * num_slots >= OWN_MEMORY_FROM else 0)
        return make(self, num_slots)

    patch.setattr(ngram_index, "enter_text", entering)
    patch.setattr(ngram_index, "move", moving)
    patch.setattr(Allowance, "make_table", making)
    return done


def test_every_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that a call does, and bytes that it frees, while long texts come, one of them said twice, and go at once.

    Kills: clearing, moving or asking for tables that costs nothing, work of its own for each long prompt beside the
    shared, what others leave of theirs added to it, a forget that frees all, and one that nothing is freed after.
    """
    rng, shared, freed = np.random.default_rng(0), 1500, 1 << 18
    monkeypatch.setattr(prompt_lookup, "SHARED_WORK", shared)
    monkeypatch.setattr(prompt_lookup, "FREED_BYTES", freed)
    proposer, done = lookup(), count_work(monkeypatch)
    texts = [rng.integers(0, 1 << 30, 20_000).tolist() for _ in range(8)]
    texts[0][10_000:] = texts[0][:10_000]
    requests = {str(row): text for row, text in enumerate([*texts[:4], *([[1, 2, 3]] * 40)])}
    options = [{}] * 40 + [{"reference": np.array(text, np.int32)} for text in texts[4:]]
    names, limits, histories = list(requests), np.full(44, 4, np.int32), batch(requests).token_ids

    def step() -> int:
        done.clear()
        before = proposer.num_bytes()
        proposer.propose(DraftBatch(names, list(histories), limits, options))
        assert before - proposer.num_bytes() <= freed
        return sum(done)

    spent = [step()]
    while spent[-1]:
        spent.append(step())
    assert max(spent) <= shared + 40 * 2 + 34, "more than it may, 2 tokens of each short one, and the last look"
    assert sum(spent) > 8 * 20_000 and len(spent) < 250
    held = proposer.num_bytes()
    proposer.forget(names)
    assert held - freed - 48 * 1000 <= proposer.num_bytes() < held, "small ones go at once"
    names, histories, limits, options = ["new"], histories[-1:], limits[:1], options[:1]
    for _ in range(held // freed + 10):
        step()
    assert proposer.num_bytes() < 1000


def test_full_memory() -> None:
    """A request whose index finds no room is not drafted for, gives back what it held, and holds up nobody.

    Kills: a bound for each request, bytes that are not given back, and half-built indexes that wait for each other.
    """
    proposer = lookup(max_index_bytes=1 << 20)
    requests = {name: [*LONG, 1, 2] for name in "abcdefgh"}
    for _ in range(200):
        found = drafts(proposer, requests)
        held = [request.index.num_bytes for request in proposer._requests.values()]
        allowance = proposer._allowance
        assert sum(held) == allowance.num_bytes - allowance.num_dropped_bytes
        assert allowance.num_bytes <= 1 << 20
    ready = [name for name, draft in zip(requests, found, strict=True) if draft]
    assert ready == list(proposer._requests) and 0 < len(ready) < 8
    proposer.forget(ready)
    assert proposer._allowance.num_bytes == 0
    for _ in range(100):
        found = drafts(proposer, {"new": requests["a"]})
    assert found != [[]]


@pytest.mark.parametrize("bad", [[1, 2, -1, 4, 1, 2], [-1, 1]])
def test_a_fault_in_one_requests_data(bad: list[int]) -> None:
    """Costs that request its drafts, and nobody else. Kills: an exception that leaves propose or continue_drafts, and a
    request that is tried again at every step."""
    proposer = lookup()
    requests = {"a": [1, 2, 3, 4, 9, 1, 2], "bad": bad, "c": [7, 7, 7]}
    for _ in range(3):
        assert drafts(proposer, requests) == [[3, 4, 9, 1], [], [7, 7, 7, 7]]
    again = batch(requests)
    assert continued(proposer, again, 1, [], 4) == []
    assert continued(proposer, again, 0, [3], 3) == [4, 9, 1]
    assert set(proposer._requests) == {"a", "c"}
    proposer.forget(["bad"])
    assert drafts(proposer, {"bad": [1, 2, 3, 1, 2]}) == [[3, 1, 2, 3]]
    bad_reference = {"a": [1, 2, 3, 4, 9, 1, 2], "c": [7, 7, 7]}
    assert drafts(proposer, bad_reference, reference=[5, -1, 6])[0] == [3, 4, 9, 1]


def test_continued_drafts() -> None:
    """A begun draft stands behind the history, and is not remembered."""
    proposer = lookup()
    now = batch({"a": [1, 2, 3, 4, 9, 1, 2]})
    assert continued(proposer, now, 0, [3], 2) == [4, 9]
    assert continued(proposer, now, 0, [3, 4, 9], 9) == [1, 2, 3, 4], "as many as there may be"
    assert continued(proposer, now, 0, [50, 51], 2) == []
    assert continued(proposer, now, 0, [50, 51, 8, 50, 51], 2) == []


def test_a_reference_is_not_kept_waiting() -> None:
    """Requests that come and go all the time share a reference that is longer than what any of them waits for.

    Kills: a rest that counts as a whole, however many wait for it; then there is never a draft.
    """
    rng, proposer = np.random.default_rng(1), lookup()
    reference = [*rng.integers(0, 100, 400).tolist(), 60, 50, 60]
    found = []
    for wave in range(4):
        requests = {f"{wave} {row}": [*rng.integers(0, 100, 120).tolist(), 60, 50] for row in range(128)}
        found += drafts(proposer, requests, reference=reference)
        proposer.forget([f"{wave} {row}" for row in range(128) if row or wave == 3])
    assert sum(map(bool, found)) > 100
