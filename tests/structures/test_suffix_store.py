"""Suffix store and the texts of requests against a brute-force oracle; docstrings name mutations that a test kills."""

import doctest
import os
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from vllm_specplugins.structures.suffix import requests as suffix_requests
from vllm_specplugins.structures.suffix import store as suffix_store
from vllm_specplugins.structures.suffix.chains import LEVELS
from vllm_specplugins.structures.suffix.drafts import Asked
from vllm_specplugins.structures.suffix.pages import NEWER, NONE, OLDEST, OWNER, PAGE, PROVEN, UNPROVEN
from vllm_specplugins.structures.suffix.requests import SuffixRequests
from vllm_specplugins.structures.suffix.search import LONGEST_MATCH, MOST_PLACES
from vllm_specplugins.structures.suffix.store import SuffixStore

NUM_OPERATIONS = 100_000 if os.environ.get("SPECPLUGINS_FUZZ") else 6_000
K = 6
FIRST_ID = 1000  # the first token of a text in the store says which it is


def ids(*tokens):
    return np.array(tokens, np.int32)


def contents(store):
    """Tenant and tokens of each text that is there, unproven ones first, those used longest ago first."""
    for kind in (UNPROVEN, PROVEN):
        first = int(store.texts.state[OLDEST + kind])
        while first != NONE:
            yield store._names[int(store.texts.pages[first, OWNER])], store.texts.read(first)
            first = int(store.texts.pages[first, NEWER])


def ask(table, store, row, flat, num_tokens=0, num_begun=0):
    """Of one request whose text ends with flat; no token of it is new."""
    rows = np.array([row, len(flat), 0, num_tokens, K])
    return table.step(Asked(flat, rows, num_begun, 0.0), store.texts)


def oracle(texts, ending, copies=()):
    """What most places of the longest match go on with, texts newest first, and its length; see suffix/search.py."""
    reach = min(LONGEST_MATCH, len(ending))
    places = [(t, i) for t in texts for i in range(len(t) - 2, -1, -1) if t[i] == ending[-1]]
    lengths = [next((n for n in range(reach) if i < n or t[i - n] != ending[-1 - n]), reach) for t, i in places]
    level = max((n for n in LEVELS if n <= max(lengths, default=0)), default=0)
    found = [place for place in zip(lengths, places, strict=True) if place[0] >= level][:MOST_PLACES]
    longest = max((length for length, _ in found), default=0)
    going_on, draft = [place for length, place in found if length == longest], []
    while len(draft) < K:
        said = [([*t, *copies, *draft] if copies is not None else t)[i + 1 + len(draft) :][:1] for t, i in going_on]
        votes = Counter(token for tokens in said for token in tokens)  # the first of the largest is the latest
        if not votes:
            break
        draft.append(max(votes, key=votes.get))
        going_on = [place for place, tokens in zip(going_on, said, strict=True) if tokens == draft[-1:]]
    return draft, longest


class Served:
    """A table of requests and a store, beside what they should hold. Every token of a draft is taken to be certain."""

    def __init__(self, rng, num_bytes):
        self.rng = rng
        self.table = SuffixRequests(num_bytes, 1, K)
        self.table._kept.accept_probs[:] = 1.0
        self.store = SuffixStore(num_bytes)
        self.live = {}  # row: (tenant, history, length of the prompt)
        self.entered = []  # every text that ever went into the store

    def begin(self, tenant, history):
        self.live[row := self.table.add()] = (tenant, history, len(history))
        self.append(row, [])

    def append(self, row, tokens):
        self.live[row][1].extend(tokens)
        self.table.enter(row, ids(*self.live[row][1]), self.rng.choice((20, 1 << 40)))

    def end(self, row, learns):
        tenant, history, num_prompt = self.live.pop(row)
        self.table.drop(row)
        if learns:
            text = [FIRST_ID + len(self.entered), *history[num_prompt:]]
            if self.store.enter(tenant, ids(*text)):
                self.entered.append(text)
        return tenant, history

    def visible(self, tenant):
        """The tenant's texts in the store, newest first; each must be what was entered, or the beginning of it."""
        own = [text.tolist() for name, text in contents(self.store) if name == tenant]
        entering, leaving = self.store._entering, self.store._leaving
        if entering is not None and entering.tenant == tenant:
            own.append(entering.text[: entering.start].tolist())
        if leaving != NONE and self.store._names[int(self.store.texts.pages[leaving, OWNER])] == tenant:
            own.append(self.store.texts.read(leaving).tolist())
        own = sorted((text for text in own if text), reverse=True)
        for text in own:
            assert text == self.entered[text[0] - FIRST_ID][: len(text)]
        return own

    def check(self, row, begun):
        tenant, history, _ = self.live[row]
        self.table.search_store(row, self.store.number(tenant))
        self.table._kept.newest[:] = 0
        flat = ids(*history[-LONGEST_MATCH:], *begun)
        (out, num_draft, match_lengths), cut_off = ask(self.table, self.store, row, flat, len(history), len(begun))
        ending, own = [*history, *begun], ([], 0)
        if self.table.is_whole(row):
            own = oracle([history], ending, begun)
        theirs = oracle(self.visible(tenant), ending, None)
        draft, length = theirs if len(theirs[0]) > len(own[0]) else own
        assert (out[0, : num_draft[0]].tolist(), match_lengths[0] if draft else 0) == (draft, length if draft else 0)
        assert cut_off == 0


@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_oracle(vocab_size, monkeypatch):
    """Random requests begin, grow, end, are preempted or forgotten, while the store removes what is old.

    Kills: an older place preferred among equals; a match that is counted though it is shorter; UNLINKED places not
    linked when a second one comes; a slot left behind by a place that is gone, or not moved up; the end of a page taken
    for the end of a text; places of a page that was removed; a copy that does not go on behind the end of the text.
    """
    monkeypatch.setattr(suffix_requests, "SPARE_TOKENS", 8)  # texts often need another piece
    rng = random.Random(vocab_size)
    served = Served(rng, 1 << 17)

    def tokens(most):
        return [rng.randrange(vocab_size) for _ in range(rng.randrange(1, most))]

    for _ in range(NUM_OPERATIONS // 3):
        row = rng.choice(list(served.live)) if served.live else None
        match rng.choices(("begin", "append", "finish", "preempt", "forget"), (2, 12, 1, 1, 0.5))[0]:
            case "begin" if len(served.live) < 4:
                served.begin(rng.choice((b"a", b"b")), tokens(70))
            case "append" if row is not None and len(served.live[row][1]) - served.live[row][2] < 80:
                served.append(row, tokens(12))
            case "finish" | "append" if row is not None:
                served.end(row, True)
            case "preempt" if row is not None and len(served.live[row][1]) < 150:
                served.begin(*served.end(row, True))
            case "forget" if row is not None:
                served.end(row, False)
        served.store.work(rng.choice((5, 50, 1 << 40)))
        if served.live:
            served.check(rng.choice(list(served.live)), rng.choice(([], [], tokens(4)[:2])))
    assert served.store.num_removed > 0


def numbered(rng, count):
    return rng.integers(0, 50_000, count).astype(np.int32)


def test_memory():
    """A million tokens of random traffic stay within the bound, and what is counted is what there is.

    Fails if a page is lost, or not counted: texts, free pages and bytes would no more add up.
    """
    rng, max_bytes = np.random.default_rng(0), 1 << 22
    tracemalloc.start()
    store = SuffixStore(max_bytes)
    done = 0
    while done < 1_000_000:
        text = numbered(rng, int(rng.integers(2, 1500)))
        store.enter(rng.bytes(1), text)
        done += len(text)
        store.work(int(rng.integers(1, 20_000)))
        assert store.num_bytes <= max_bytes
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    store.work()
    texts = [text for _, text in contents(store)]
    assert len(texts) == store.num_texts and sum(map(len, texts)) == store.texts.num_tokens
    assert sum(-(-len(text) // PAGE) for text in texts) == store.texts.num_pages - store.texts.num_free
    assert store.texts.num_tokens > 0.8 * store.texts.num_pages * PAGE, "most of the room is used"
    assert abs(held - store.num_bytes) < 0.01 * max_bytes


def test_used_last_goes_last():
    """The text that was used longest ago makes room. Fails if using a text, or the order, makes no difference."""
    store = SuffixStore(1 << 17)
    table = SuffixRequests(1 << 16, 1, K)
    rng = np.random.default_rng(0)
    texts = [numbered(rng, 64) for _ in range(100)]
    first = texts[0][:40]
    for text in texts:
        store.enter(b"", text)
        store.work()
        ask(table, store, 0, first)  # no tenant: nothing is used
        row = table.add()
        table.search_store(row, store.number(b""))
        (out, num_draft, _), _ = ask(table, store, row, first)
        assert out[0, : num_draft[0]].tolist() == texts[0][40 : 40 + K].tolist()
        table.drop(row)
    held = [text.tolist() for _, text in contents(store)]
    assert held == [text.tolist() for text in (*texts[-len(held) + 1 :], texts[0])]


def test_tenants_share_the_room():
    """Who floods the store evicts itself once it holds more than its share. Fails if the oldest always goes."""
    store, rng = SuffixStore(1 << 17), np.random.default_rng(0)
    for _ in range(5):
        store.enter(b"small", numbered(rng, 64))
    for _ in range(300):
        store.enter(b"large", numbered(rng, 64))
        store.work()
    assert [tenant for tenant, _ in contents(store)].count(b"small") == 5
    assert store.num_removed > 200


class Room:
    """Whose text makes room for whose, by hand; each text has a page."""

    def __init__(self, num_pages):
        self.num_pages, self.texts, self.back, self.clock = num_pages, [], set(), 0

    def enter(self, tenant, text):
        while len(self.texts) == self.num_pages:
            self.texts.remove(self.victim(tenant))
            self.back &= {name for _, _, name, _ in self.texts}
        self.put(tenant, text, tenant in self.back)

    def put(self, tenant, text, is_proven):
        self.clock += 1
        self.texts.append((is_proven, self.clock, tenant, text))

    def victim(self, tenant):
        present, own = {name for _, _, name, _ in self.texts}, [text for text in self.texts if text[2] == tenant]
        if len(own) * len(self.back if tenant in self.back else present) > self.num_pages:
            return min(own)
        oldest, proven = min(self.texts), min((text for text in self.texts if text[0]), default=None)
        num_strangers = sum(name not in self.back for _, _, name, _ in self.texts)
        is_spared = oldest[2] not in self.back and 16 * num_strangers < self.num_pages
        return proven if is_spared and proven else oldest


@pytest.mark.parametrize("num_tenants", [1, 5, 60])
def test_who_makes_room(num_tenants):
    """Random tenants enter, come back and draft, beside what should be there.

    Kills: any other text removed; a flag or a number of pages that outlives its tenant, or is counted for others; a use
    that proves nothing.
    """
    rng, store, table = random.Random(num_tenants), SuffixStore(1 << 17), SuffixRequests(1 << 16, 1, K)
    room = Room(store.texts.num_pages)
    for number in range(2000):
        tenant = str(int(rng.random() ** 3 * num_tenants)).encode()
        if rng.random() < 0.5:
            store.enter(tenant, ids(*range(10 * number, 10 * number + 10)))
            store.work()
            room.enter(tenant, number)
        elif room.texts and rng.random() < 0.5:
            used = rng.choice(room.texts)
            table.search_store(row := table.add(), store.number(used[2]))
            assert ask(table, store, row, ids(10 * used[3], 10 * used[3] + 1))[0].num_draft[0] == K
            table.drop(row)
            room.texts.remove(used)
            room.put(*used[2:], True)
        else:
            store.ask(tenant)
            room.back |= {name for _, _, name, _ in room.texts if name == tenant}
        expected = [(name, 10 * text) for _, _, name, text in sorted(room.texts)]
        assert [(name, text[0]) for name, text in contents(store)] == expected
    assert store.num_removed > 300


@pytest.mark.parametrize("times", [1, 2])
def test_many_salts(times):
    """1,200 tenants of one client, each of which asks so often, do not evict one that is in use: the outputs that it is
    drafted from now and then, nor, if theirs are asked for once, those that it has had since it came back.

    Fails if all tenants count alike.
    """
    store, rng = SuffixStore(1 << 21), np.random.default_rng(0)
    table = SuffixRequests(1 << 16, 1, K)
    mine = [numbered(rng, 24) for _ in range(100)]
    for text in mine:
        store.ask(b"me")
        store.enter(b"me", text)
        store.work()
    for salt in range(1200):
        for _ in range(times):
            store.ask(b"%d" % salt)
            store.enter(b"%d" % salt, numbered(rng, 24))
            store.work()
        table.search_store(row := table.add(), store.ask(b"me"))
        ask(table, store, row, mine[1 + salt % 10][:12])
        table.drop(row)
    held = {text.tobytes() for tenant, text in contents(store) if tenant == b"me"}
    kept = [text.tobytes() in held for text in mine]
    assert all(kept[1:] if times == 1 else kept[1:11]) and store.num_removed > 400


def test_tenants_never_meet():
    """Two tenants with opposite texts: what one is drafted is its own. Fails if owners are neither hashed nor compared.

    Half of the tokens are the other's, too, so that their n-grams meet in the same table.
    """
    rng = np.random.default_rng(0)
    store, table = SuffixStore(1 << 20), SuffixRequests(1 << 16, 2, K)
    rows = {b"even": table.add(), b"odd": table.add()}
    for step in range(400):
        tenant, rest = [(b"even", 0), (b"odd", 1)][step % 2]
        text = rng.integers(0, 20, 60).astype(np.int32)
        text[1::2] = 2 * rng.integers(50, 70, 30) + rest
        store.enter(tenant, text)
        store.work()
        for name, row in rows.items():
            table.search_store(row, store.number(name))
            (out, num_draft, _), _ = ask(table, store, row, text[:1])
            drafted = out[0, : num_draft[0]]
            assert set((drafted[drafted >= 100] % 2).tolist()) <= {0 if name == b"even" else 1}


@pytest.mark.parametrize("max_bytes", [0, 1 << 16])
def test_too_small(max_bytes):
    with pytest.raises(ValueError, match="max_bytes is"):
        SuffixStore(max_bytes)


def test_examples():
    assert doctest.testmod(suffix_store).failed == 0
