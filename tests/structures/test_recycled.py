"""Recycled tokens against dictionaries; docstrings say when a test fails."""

import random
import time

import numpy as np
import pytest

from vllm_specplugins.structures.recycled import BYTES_PER_TOKEN, NO_TABLE, RecycledTokens

V, NUM_TABLES, WIDTH = 12, 3, 5
TENANTS = [b"", b"a", b"b", b"c", b"d"]


class Oracle:
    """The same in dictionaries: tenant, then token, to the likeliest next one and how often in a row."""

    def __init__(self):
        self.found = {}

    def of(self, tenants):
        wanted = list(dict.fromkeys(tenants))
        for tenant in [one for one in wanted if one in self.found]:
            self.found[tenant] = self.found.pop(tenant)
        for tenant in [one for one in wanted if one not in self.found]:
            if len(self.found) == NUM_TABLES:
                if next(iter(self.found)) in wanted:
                    break
                del self.found[next(iter(self.found))]
                self.found[tenant] = {}
                break
            self.found[tenant] = {}

    def learn(self, tenant, token, following):
        if tenant in self.found:
            last, times = self.found[tenant].get(token, (following, 0))
            self.found[tenant][token] = following, min(255, times + 1 if last == following else 1)

    def follow(self, tenant, token, wanted):
        known, draft, first = self.found.get(tenant, {}), [], known_times(self.found.get(tenant, {}), token)
        while len(draft) < wanted and token in known:
            draft.append(token := known[token][0])
        return draft, first


def known_times(known, token):
    return known.get(token, (0, 0))[1]


def test_against_dictionaries():
    """20,000 random steps of up to 5 requests, of more tenants than there are tables.

    Fails if a table is given away while one of the step has it, or is not cleared; if the oldest is not the one that
    was asked for longest ago; if a count goes on behind another token, or over; if a later pair does not win.
    """
    rng, oracle = random.Random(0), Oracle()
    tokens = RecycledTokens(NUM_TABLES * V * BYTES_PER_TOKEN, V)
    for step in range(20_000):
        tenants = rng.choices(TENANTS, k=rng.randrange(1, 6))
        tables, _ = tokens.of(tenants), oracle.of(tenants)
        assert [table != NO_TABLE for table in tables] == [tenant in oracle.found for tenant in tenants]
        pairs = [(rng.randrange(len(tenants)), rng.randrange(V), rng.randrange(V)) for _ in range(rng.randrange(4))]
        pairs = [(row, token, token if step % 1000 < 300 else following) for row, token, following in pairs]
        given = np.array(pairs, np.int32).reshape(-1, 3).T
        tokens.learn(tables[given[0]], np.ascontiguousarray(given[1]), np.ascontiguousarray(given[2]))
        for row, token, following in pairs:
            oracle.learn(tenants[row], token, following)
        newest, wanted = [rng.randrange(V) for _ in tenants], [rng.randrange(WIDTH + 1) for _ in tenants]
        found, num_draft, times = tokens.follow(tables, np.array(newest, np.int32), np.array(wanted), WIDTH)
        drafts = [row[:count].tolist() for row, count in zip(found, num_draft, strict=True)]
        assert list(zip(drafts, times, strict=True)) == [
            oracle.follow(*asked) for asked in zip(tenants, newest, wanted, strict=True)
        ]


def test_tenants():
    """No token of a tenant's own half of the vocabulary is ever drafted for the other, tables given away included.

    Fails if a table keeps what its last owner found.
    """
    rng = np.random.default_rng(0)
    tokens = RecycledTokens(V * BYTES_PER_TOKEN, V)
    names, halves = (b"low", b"high"), (np.arange(V // 2), np.arange(V // 2, V))
    drafted = 0
    for _ in range(2000):
        side = int(rng.integers(2))
        table = tokens.of([names[side]])
        read, following = rng.integers(V, size=3).astype(np.int32), rng.choice(halves[side], 3).astype(np.int32)
        tokens.learn(table.repeat(3), read, following)
        found, [count], _ = tokens.follow(table, rng.integers(V, size=1).astype(np.int32), np.array([WIDTH]), WIDTH)
        assert set(found[0, :count].tolist()) <= set(halves[side].tolist())
        drafted += count
    assert drafted > 1000


def test_bytes():
    """As much memory as is allowed, to one table. Fails if a table is one too many, or if too little room is none."""
    tokens = RecycledTokens(3 * 1000 * BYTES_PER_TOKEN + 4999, 1000)
    assert tokens.num_bytes == 3 * 1000 * BYTES_PER_TOKEN
    tokens.of([b"%d" % number for number in range(50)])
    assert tokens.num_bytes == 3 * 1000 * BYTES_PER_TOKEN and tokens.num_tenants == 3
    with pytest.raises(ValueError, match="max_table_bytes must be at least 5000, one table of 1000 tokens, not 4999"):
        RecycledTokens(4999, 1000)


def test_what_is_no_token():
    """Ids beyond the vocabulary, which a padded head or a placeholder may bring, are left out.

    Fails if one is written or followed: memory that is not the table's.
    """
    tokens = RecycledTokens(2 * V * BYTES_PER_TOKEN, V)
    table = tokens.of([b"a", b"b"])
    for wrong in (-1, V, V + 3, 2**31 - 1):
        pairs = np.array([wrong, 1, 2], np.int32), np.array([1, wrong, 3], np.int32)
        tokens.learn(table[:1].repeat(3), *pairs)
        found, count, _ = tokens.follow(table, np.array([wrong] * 2, np.int32), np.array([WIDTH] * 2), WIDTH)
        assert count.tolist() == [0, 0] and not found.any()
    everywhere = table.repeat(V), np.tile(np.arange(V, dtype=np.int32), 2)
    _, count, _ = tokens.follow(*everywhere, np.full(2 * V, WIDTH), WIDTH)
    assert np.flatnonzero(count).tolist() == [2], "the only pair of tokens"


def test_many_new_tenants_hold_up_nobody():
    """256 new tenants at once, where all tables are others': one is cleared. Fails if each clears one, for 20 ms."""
    tokens = RecycledTokens(256 * 128_000 * BYTES_PER_TOKEN, 128_000)
    for batch in (b"a%d", b"b%d"):
        names = [batch % number for number in range(256)]
        start = time.thread_time()
        tables = tokens.of(names)
        elapsed_ms = (time.thread_time() - start) * 1000
    assert (tables != NO_TABLE).sum() == 1 and elapsed_ms < 5
