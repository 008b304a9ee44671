"""Token recycling as a proposer and as a stage: what it learns, from whom, and for whom; docstrings say when a test
fails."""

import numpy as np
import pytest

from vllm_specplugins.config import ConfigError, TokenRecyclingConfig
from vllm_specplugins.draft import DraftBatch, Feedback, Likeliest, ProposerContext
from vllm_specplugins.methods import build_proposer, parse_config
from vllm_specplugins.proposers.barrier import FaultBarrier
from vllm_specplugins.proposers.read_only import rows_of
from vllm_specplugins.proposers.token_recycling import TokenRecycling

K, V = 4, 1000
CONTEXT = ProposerContext(V, 1 << 16, 4, K, tokenize=lambda text: [])
CHAIN = [(7, 8), (8, 9), (9, 7)]


def batch_of(texts, seen=(), options=None):
    """Requests that end so, and (request, token, likeliest) of the step before."""
    names = [f"request {number}" for number in range(len(texts))]
    arrays = np.array(list(seen), np.int32).reshape(-1, 3).T
    return DraftBatch(
        names,
        [np.array(text, np.int32) for text in texts],
        np.full(len(names), K, np.int32),
        options or [{}] * len(names),
        likeliest=Likeliest(*map(np.ascontiguousarray, arrays)),
    )


def drafts(draft):
    return [row[:count].tolist() for row, count in zip(draft.token_ids, draft.num_draft, strict=True)]


def proposer():
    return TokenRecycling(TokenRecyclingConfig(), CONTEXT)


def test_chains():
    """What one request's step found is drafted for all of its tenant, at once, and as often as it was found.

    Fails if a pair is entered for another token, or a step late; if a stage that is asked twice in a step counts twice.
    """
    own = proposer()
    batch = batch_of([[1, 7], [5, 9], [3]], [(0, *CHAIN[0]), (0, *CHAIN[1]), (1, *CHAIN[2])])
    for _ in range(2):
        draft = own.propose(batch)
        assert drafts(draft) == [[8, 9, 7, 8], [7, 8, 9, 7], []]
        assert draft.confidence.tolist() == [1, 1, 0]
    again = own.propose(batch_of([[7], [8]], [(1, 7, 8), (0, 8, 2)]))
    assert drafts(again) == [[8, 2], [2]] and again.confidence.tolist() == [2, 1]
    own.reset_store()
    assert drafts(own.propose(batch_of([[7]]))) == [[]]


def test_for_whom():
    """Fails if another tenant's pairs are drafted, or those of a request that is not to be learnt from; if options that
    came past the front end do harm."""
    own = proposer()
    options = [{"tenant": b"a"}, {"learn": False}, {}, {"tenant": 3, "learn": "no"}]
    seen = [(0, 7, 8), (1, 7, 9), (2, 5, 6), (3, 4, 5)]
    assert drafts(own.propose(batch_of([[7]] * 4, seen, options))) == [[8], [], [], []]
    assert drafts(own.propose(batch_of([[5]] * 4, [], options))) == [[], [6], [6], [6]]
    assert drafts(own.propose(batch_of([[4]], [], [{}]))) == [[]]


def test_continues_drafts():
    """Fails if a draft that was begun is not what is continued, or more is drafted than wanted."""
    own = proposer()
    batch = batch_of([[7], [7], [1]], [(0, *pair) for pair in CHAIN])
    begun = np.array([[1, 8, 5, 5], [0, 0, 0, 0], [9, 0, 0, 0]], np.int32)
    token_ids, num_draft, _ = own.continue_drafts(batch, begun, np.array([2, 0, 1]), np.array([2, 1, 3]))
    assert [row[:count].tolist() for row, count in zip(token_ids, num_draft, strict=True)] == [[9, 7], [8], [7, 8, 9]]


def test_some_rows():
    """A batch of some requests has their pairs alone. Fails if one of another's, or with another's number, is left."""
    batch = batch_of([[1], [2], [3]], [(0, 10, 11), (1, 12, 13), (1, 14, 15), (2, 16, 17)])
    some = rows_of(batch, [0, 2], np.array([K, K], np.int32)).likeliest
    assert [array.tolist() for array in (some.requests, some.token_ids, some.next_ids)] == [
        [0, 1],
        [10, 16],
        [11, 17],
    ]
    with pytest.raises(ValueError, match="read-only"):
        some.next_ids[0] = 1


TEXT = [*range(100, 140)]
REPEATED = [*TEXT, 140, 141, 142, 7, *TEXT]  # of which a lookup knows what follows


def guarded(**first):
    """A cascade of a lookup and recycling."""
    stages = [{"method": "prompt_lookup", **first}, {"method": "token_recycling"}]
    config = parse_config({"method": "cascade", "gate": "off", "num_speculative_tokens": K, "stages": stages})
    return FaultBarrier(build_proposer(config, CONTEXT), V, K, None)


def step(barrier, texts, seen=()):
    batch, nothing = batch_of(texts, seen), np.zeros(len(texts), np.int32)
    return drafts(barrier.propose(batch, Feedback(batch.request_ids, nothing, nothing)))


def test_where_nothing_is_found():
    """Behind a lookup without a gate. Fails if a step in which the lookup drafts for all teaches nothing."""
    barrier = guarded()
    for pair in CHAIN:
        assert step(barrier, [REPEATED], [(0, *pair)]) == [[140, 141, 142, 7]]
    assert step(barrier, [REPEATED, [7]]) == [[140, 141, 142, 7], [8, 9, 7, 8]]
    assert barrier.totals().faults == {}


def test_a_fault_costs_its_drafts():
    """A table that breaks is a stage's fault, and the lookup before it drafts. Fails if it is the cascade's, or the
    engine's."""
    barrier = guarded()
    barrier.proposer._stages[1]._tokens = None
    for _ in range(3):
        assert step(barrier, [REPEATED], [(0, 7, 8)]) == [[140, 141, 142, 7]]
    counters = barrier.totals()
    assert counters.faults == {} and counters.stages["1 token_recycling"].faults == {"raised": 3}


def test_configuration():
    """Fails if what cannot be is taken, or refused without saying what is allowed."""
    for raw, words in (
        ({"max_table_bytes": 1}, r"max_table_bytes must be an integer from 65536 to 68719476736, not 1\."),
        ({"table_bytes": 1}, "'table_bytes' is not a field; the fields are max_table_bytes, num_spec"),
        ({"verification": "vllm"}, "verification must be 'fused' for token_recycling, .* not 'vllm'"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_config({"method": "token_recycling", **raw})
    stages = [{"method": "suffix_lookup"}, {"method": "token_recycling"}]
    with pytest.raises(ConfigError, match="cascade: verification must be 'fused' for token_recycling"):
        parse_config({"method": "cascade", "verification": "vllm", "stages": stages})
    config = parse_config({"method": "token_recycling", "max_table_bytes": 1 << 16})
    wide = ProposerContext(100_000, 1 << 16, 4, K, tokenize=lambda text: [])
    with pytest.raises(ConfigError, match=r"token_recycling: max_table_bytes must be at least 500000, .* not 65536"):
        build_proposer(config, wide)
