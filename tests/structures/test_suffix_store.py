"""The suffix store against a brute-force oracle, and who makes room in it; docstrings name mutations that it kills."""

import os
import random
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from vllm_specplugins.structures.arrays import places_of
from vllm_specplugins.structures.drafts import begun
from vllm_specplugins.structures.suffix import drafts as suffix_drafts
from vllm_specplugins.structures.suffix import ring
from vllm_specplugins.structures.suffix.drafts import LONGEST_MATCH, MAX_PLACES, draft_step
from vllm_specplugins.structures.suffix.ring import HEAD, LEVELS, MULTIPLIER, Ring
from vllm_specplugins.structures.suffix.store import MAX_NUMBERS, MAX_STAYING, MIN_PLACES, SuffixStore

NUM_OPERATIONS = 100_000 if os.environ.get("SPECPLUGINS_FUZZ") else 6_000
K = 6


def ids(*tokens):
    return np.array(tokens, np.int32)


def ask(store, tenant, ending, to_beat=0):
    """The draft and the length of its match, for a request with this text."""
    drafts = np.zeros((1, K), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)
    numbers = np.array([K]), np.array([to_beat]), np.array([store.number(tenant)])
    draft_step((*places_of([ending]), *begun(None), *numbers), *drafts, tuple(store.ring))
    return drafts[0][0, : drafts[1][0]].tolist(), int(drafts[2][0])


def entered(store, tenant, *texts):
    for text in texts:
        store.enter(tenant, text)
        store.work()


def names(store):
    """Tenant and first token of each text that is there."""
    return [(text.tenant, int(text.tokens[0])) for text in store.texts()]


def oracle(texts, ending):
    """The draft and the length of its match, by the votes of suffix/drafts.py; texts come newest first."""
    reach = min(LONGEST_MATCH, len(ending))
    places = [(t, i) for t, end in texts for i in range(end - 1, -1, -1) if t[i] == ending[-1]]
    lengths = [next((n for n in range(reach) if i < n or t[i - n] != ending[-1 - n]), reach) for t, i in places]
    level = max((n for n in LEVELS if n <= max(lengths, default=0)), default=0)
    matches = [place for place in zip(lengths, places, strict=True) if place[0] >= level][:MAX_PLACES]
    longest = max((length for length, _ in matches), default=0)
    going_on, draft = [place for length, place in matches if length == longest], []
    while len(draft) < K:
        next_ones = [t[i + 1 + len(draft) :][:1] for t, i in going_on]
        votes = Counter(token for tokens in next_ones for token in tokens)  # the first of the largest is the latest
        if not votes:
            break
        draft.append(max(votes, key=votes.get))
        going_on = [place for place, tokens in zip(going_on, next_ones, strict=True) if tokens == draft[-1:]]
    return draft, longest if draft else 0


@pytest.mark.parametrize("vocab_size", [2, 5, 40])
def test_oracle(vocab_size, monkeypatch):
    """Random texts of two tenants are entered by pieces, while they overwrite what is old. Kills: an older place
    preferred among equals; a match that is counted though it is shorter, or goes on into another text, or what was
    overwritten; a place that is taken though its text ends there; one that is not linked; a match that is not longer
    than that to beat.
    """
    monkeypatch.setattr(ring, "SETS_PER_WAYS", (64, 19))  # no entry ever has to go
    rng, store, put = random.Random(vocab_size), SuffixStore(1 << 18), []
    monkeypatch.setattr(
        store, "_put", lambda text: (put.append((int(store.ring.state[HEAD]) + 1, text)), SuffixStore._put(store, text))
    )

    def tokens(longest):
        return ids(*(rng.randrange(vocab_size) for _ in range(rng.randrange(2, longest))))

    def visible(tenant):
        for begin, text in reversed(put):
            gone = max(0, int(store.ring.state[HEAD]) - store.capacity - begin)
            end = len(text.tokens) - 1
            if store._linking is not None and text is put[-1][1]:
                end = store._linking[1]
            if text.tenant == tenant and gone < len(text.tokens):
                yield text.tokens[gone:].tolist(), end - gone

    for _ in range(NUM_OPERATIONS // 10):
        store.enter(rng.choice((b"a", b"b")), tokens(70))
        store.work(rng.choice((5, 50, 1 << 40)))
        ending = tokens(40)
        if put and rng.random() < 0.7:
            text = rng.choice(put[-50:])[1].tokens
            ending = np.concatenate((ending, text[: rng.randrange(2, len(text) + 1)]))
        draft, length = oracle(list(visible(b"a")), ending.tolist())
        assert ask(store, b"a", ending) == (draft, length)
        assert ask(store, b"a", ending, to_beat=length) == ([], 0)
    assert store.num_removed > 0


def numbered(rng, count):
    return rng.integers(0, 50_000, count).astype(np.int32)


def test_tables_are_large_enough():
    """A search finds all but a few texts of a full store. Fails if tables lose what is there."""
    rng, store = np.random.default_rng(0), SuffixStore(1 << 20)
    for _ in range(60):
        entered(store, b"", numbered(rng, 600))
    matches = [ask(store, b"", text.tokens[i - 12 : i])[1] for text in store.texts() for i in range(20, 590, 7)]
    assert np.mean(np.array(matches) == 12) > 0.98


def test_memory():
    """A million tokens of random traffic stay within the bound, and what is counted is what there is. Fails if a text
    is lost, or not counted.
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
    ours = [tracemalloc.Filter(True, "*vllm_specplugins*", all_frames=True)]  # not of threads that other tests left
    held = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).traces)
    tracemalloc.stop()
    store.work()
    texts = store.texts()
    assert len(texts) == store.num_texts and sum(len(text.tokens) for text in texts) == store.num_tokens
    assert {text.tenant for text in texts} == set(store._tenants)
    assert store.num_tokens > 0.8 * store.capacity, "texts fill the room"
    assert abs(held - store.num_bytes) < 0.01 * max_bytes


def test_used_stays():
    """A text that is drafted from stays. Fails if using a text makes no difference, or for ever."""
    rng, store = np.random.default_rng(0), SuffixStore(1 << 17)
    texts = [numbered(rng, 64) for _ in range(200)]
    for text in texts[:100]:
        entered(store, b"", text)
        assert ask(store, b"", texts[0][:40])[0] == texts[0][40 : 40 + K].tolist()
    there = {text.tokens.tobytes() for text in store.texts()}
    assert there == {text.tobytes() for text in (texts[0], *texts[101 - len(there) : 100])}
    entered(store, b"", *texts[100:])
    assert store.num_tokens == 64 * store.num_texts and ask(store, b"", texts[0][:40])[1] < 40


def test_tenants_share_the_room():
    """Who floods the store evicts itself once it holds more than its share. Fails if the oldest always goes."""
    store, rng = SuffixStore(1 << 17), np.random.default_rng(0)
    entered(store, b"small", *(numbered(rng, 64) for _ in range(5)))
    entered(store, b"large", *(numbered(rng, 64) for _ in range(300)))
    assert [tenant for tenant, _ in names(store)].count(b"small") == 5
    assert store.num_removed > 200


class Room:
    """The texts that make room for others, by hand; each text has MIN_PLACES."""

    def __init__(self, size):
        self.size, self.texts, self.back, self.used, self.credit = size, [], {}, set(), 0

    def has_too_much(self, tenant):
        held = [name for name, _ in self.texts]
        sharing = {name for name in held if name in self.back} if tenant in self.back else set(held)
        return 2 * held.count(tenant) * len(sharing) * MIN_PLACES > self.size

    def stays(self, text, entering):
        tenant = text[0]
        if text in self.used:
            return True
        if tenant == entering or self.has_too_much(tenant):
            return False
        num_strangers = sum(name not in self.back for name, _ in self.texts)
        return tenant in self.back or 16 * num_strangers * MIN_PLACES < self.size or self.has_too_much(entering)

    def enter(self, tenant, number):
        while (len(self.texts) + 1) * MIN_PLACES > self.size:
            stays = self.credit >= MIN_PLACES and self.stays(self.texts[0], tenant)
            text = self.texts.pop(0)
            self.used.discard(text)
            if stays:
                self.texts.append(text)
                self.credit -= MIN_PLACES
            self.back = {name: None for name in self.back if name in dict(self.texts)}
        self.texts.append((tenant, number))
        self.credit = min(self.credit + MAX_STAYING * MIN_PLACES, self.size // 4)


@pytest.mark.parametrize("num_tenants", [1, 5, 60])
def test_who_makes_room(num_tenants):
    """Random tenants enter, come back and draft, beside what should be there. Kills: any other text removed; a flag or
    a number of places that outlives its tenant, or is counted for others; a use that counts for nothing, or for more
    than one time; texts that stay without end.
    """
    rng, store = random.Random(num_tenants), SuffixStore(1 << 17)
    room = Room(store.capacity)
    for number in range(2000):
        tenant = str(int(rng.random() ** 3 * num_tenants)).encode()
        if rng.random() < 0.5:
            entered(store, tenant, ids(*range(10 * number, 10 * number + 10)))
            room.enter(tenant, 10 * number)
        elif room.texts and rng.random() < 0.5:
            used = rng.choice(room.texts)
            assert ask(store, used[0], ids(*range(used[1], used[1] + 4)))[0] == [*range(used[1] + 4, used[1] + 4 + K)]
            room.used.add(used)
        else:
            store.ask(tenant)
            room.back |= {name: None for name, _ in room.texts if name == tenant}
        assert names(store) == room.texts
        assert store.num_tenants == len({name for name, _ in room.texts})
    assert store.num_removed > 300


@pytest.mark.parametrize("times", [1, 2])
def test_many_salts(times):
    """1,200 tenants of one client, each of which asks so often, do not evict one that is in use: the outputs that it is
    drafted from now and then, nor, if theirs are asked for once, those that it has. Fails if all tenants count alike.
    """
    store, rng = SuffixStore(1 << 21), np.random.default_rng(0)
    mine = [numbered(rng, 24) for _ in range(100)]
    for text in mine:
        store.ask(b"me")
        entered(store, b"me", text)
    for salt in range(1200):
        for _ in range(times):
            store.ask(b"%d" % salt)
            entered(store, b"%d" % salt, numbered(rng, 24))
        store.ask(b"me")
        ask(store, b"me", mine[1 + salt % 10][:12])
    there = {text.tokens.tobytes() for text in store.texts() if text.tenant == b"me"}
    stays = [text.tobytes() in there for text in mine]
    assert all(stays if times == 1 else stays[1:11]) and store.num_removed > 300


def test_tenants_never_meet():
    """Two tenants with opposite texts: each drafts from its texts. Fails if owners are neither hashed nor compared.
    Half of the tokens are the other's, too, so that their n-grams meet in the same table.
    """
    rng, store = np.random.default_rng(0), SuffixStore(1 << 20)
    for step in range(400):
        tenant, rest = [(b"even", 0), (b"odd", 1)][step % 2]
        text = rng.integers(0, 20, 60).astype(np.int32)
        text[1::2] = 2 * rng.integers(50, 70, 30) + rest
        entered(store, tenant, text)
        for rest, name in enumerate((b"even", b"odd")):
            drafted = [token for token in ask(store, name, text[:1])[0] if token >= 100]
            assert {token % 2 for token in drafted} <= {rest}


def test_numbers_of_tenants():
    """After 2^31 tenants each still has a number of its own. Kills: a number that two tenants have, of which one then
    drafts from the other's texts."""
    store, text = SuffixStore(1 << 20), np.arange(10, 40, dtype=np.int32)
    entered(store, b"first", text)
    store._last_number = MAX_NUMBERS - 1
    for name in (b"second", b"third"):
        entered(store, name, text)
    assert [store.number(name) for name in (b"first", b"second", b"third")] == [1, MAX_NUMBERS, 2]


@pytest.mark.parametrize("max_bytes", [0, 1 << 16])
def test_too_small(max_bytes):
    with pytest.raises(ValueError, match="max_bytes is"):
        SuffixStore(max_bytes)


class Counted(np.ndarray):
    """An array that counts how often it is read."""

    reads = 0

    def __getitem__(self, at):
        Counted.reads += 1
        return super().__getitem__(at)


def test_others_texts_cost_nothing(monkeypatch):
    """A search reads as much whether another tenant's texts are what is asked for or not; of the same tenant it shows.
    Fails if owners are not hashed: then the other's places are looked at; worse, if they are not compared either.
    """
    monkeypatch.setattr(suffix_drafts, "match", ring.match.py_func)
    monkeypatch.setattr(suffix_drafts, "look_up", ring.look_up.py_func)
    monkeypatch.setattr(ring, "match", ring.match.py_func)
    random_ids, places, matches = np.random.default_rng(0), np.empty(MAX_PLACES, np.int64), np.empty((3, 4), np.int64)
    texts = [random_ids.integers(0, 1000, 48).astype(np.int32) for _ in range(12)]
    mine, strange, ending = texts[:6], texts[6:], random_ids.integers(0, 1000, LONGEST_MATCH).astype(np.int32)
    known = [np.concatenate([ending, one]) for one in strange]

    def reads(texts, others):
        store, before = SuffixStore(1 << 17), Counted.reads
        store.ring.state[MULTIPLIER] = 0x1E3779B97F4A7C15  # always the same
        entered(store, b"me", *texts)
        entered(store, b"other", *others)
        counted = Ring(*(array.view(Counted) for array in store.ring))
        with np.errstate(over="ignore"):
            suffix_drafts.find_places.py_func(ending, store.number(b"me"), places, matches, counted)
        return Counted.reads - before

    assert reads(mine, known) == reads(mine, strange) < reads(known, mine)
