"""Stores finished texts by tenant in bounded memory (suffix decoding, Oliaro et al. 2024), independently of batches and
engines."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_specplugins.structures.suffix.ring import HEAD, NONE, Int32Array, clear, link, new_ring
from vllm_specplugins.structures.suffix.store_file import StoredText

MIN_BYTES = 1 << 17
WAITING_SHARE = 16  # 1 / share of the memory for texts that wait to enter
TENANT_BYTES = 400  # memory of a tenant
STRANGERS_SHARE = 16  # 1 / share of the room for tenants that have not asked again
MAX_STAYING = 4  # maximum number of tokens that enter again for each new token
MIN_PLACES = 16  # places that a text counts for at least, since it needs memory besides its tokens
MAX_NUMBERS = (1 << 31) - 1
UNLIMITED = 1 << 62


@dataclass(slots=True)
class _Tenant:
    number: int
    num_places: int = 0
    is_back: bool = False  # the tenant asked again while it had a text


class _Text(NamedTuple):
    tenant: bytes
    begin: int  # the place of its first token; the place before that belongs to no text
    num_tokens: int
    num_places: int


class SuffixStore:
    """First in, first out, with a second chance. Texts are in a ring, and the oldest text makes room for a new one. A
    removed text enters again, as the newest, if a draft used it, or if it belongs to another tenant that has less than
    half of its share. Tenants that asked only once get a second chance only while they have little text together, or if
    the entering tenant has too much. The number of tokens that enter again is bounded. `work` does this in pieces of a
    given size. A search never reads texts of another tenant. `entered_again` gets each text that enters again. Raises
    ValueError if `max_bytes` is too small.

    >>> store = SuffixStore(1 << 20)
    >>> store.enter(b"me", np.array([1, 2, 3, 4, 5], np.int32))
    True
    """

    def __init__(self, max_bytes: int, entered_again: Callable[[StoredText], None] = lambda text: None):
        if max_bytes < MIN_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least {MIN_BYTES}.")
        self._max_waiting_bytes, self._entered_again = max_bytes // WAITING_SHARE, entered_again
        self.ring = new_ring(max_bytes - self._max_waiting_bytes)
        self.capacity = len(self.ring.tokens)
        self.clear()

    def clear(self) -> None:
        clear(self.ring)
        self._texts: deque[_Text] = deque()  # in the ring's order
        self._tenants: dict[bytes, _Tenant] = {}
        self._waiting: deque[StoredText] = deque()
        self._linking: tuple[Int32Array, int] | None = None  # the newest text, and the number of its linked tokens
        self._numbers, self._last_number = set[int](), 0  # of tenants, in the ring
        self._num_back = self._places_of_strangers = self._may_stay = 0
        self._waiting_bytes = self.num_tokens = self.num_removed = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.ring) + self._waiting_bytes

    @property
    def num_tenants(self) -> int:
        return len(self._tenants)

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def number(self, tenant: bytes) -> int:
        """Returns the tenant's owner number in the ring; 0 if it has no text."""
        entry = self._tenants.get(tenant)
        return 0 if entry is None else entry.number

    def ask(self, tenant: bytes) -> None:
        entry = self._tenants.get(tenant)
        if entry is not None and not entry.is_back:
            entry.is_back = True
            self._num_back += 1
            self._places_of_strangers -= entry.num_places

    def is_back(self, tenant: bytes) -> bool:
        """Returns whether a tenant has asked again while it had a text."""
        return tenant in self._tenants and self._tenants[tenant].is_back

    # text: [num_tokens] int32, ids >= 0
    def enter(self, tenant: bytes, text: Int32Array, in_use: bool = False) -> bool:
        """Queues a text, or the end of a long text, for the next `work`. Returns False if too many texts wait."""
        text = np.array(text[-(self.capacity // WAITING_SHARE) :], np.int32)
        num_bytes = text.nbytes + TENANT_BYTES
        if len(text) < 2 or self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            self.num_refused += 1
            return False
        self._waiting.append(StoredText(in_use, tenant, text))
        self._waiting_bytes += num_bytes
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self._linking is not None

    def work(self, limit: int = UNLIMITED) -> int:
        """Enters texts with at most this many table look-ups, and returns the number of look-ups left."""
        while limit > 0 and self.has_work:
            if self._linking is not None:
                text, (tokens, start) = self._texts[-1], self._linking
                start, limit = link(tokens, start, text.begin, self.number(text.tenant), limit, tuple(self.ring))
                self._linking = (tokens, start) if start < len(tokens) - 1 else None
            else:
                limit -= 1
                self._make_room_or_put(self._waiting[0])
        return limit

    def texts(self) -> list[StoredText]:
        return [self._stored(text) for text in self._texts]

    def _make_room_or_put(self, entering: StoredText) -> None:
        num_places = _num_places(entering.tokens)
        if self._texts and int(self.ring.state[HEAD]) + num_places - self._texts[0].begin >= self.capacity:
            oldest = self._texts[0]
            stays = oldest.num_places <= self._may_stay and self._stays(oldest, entering.tenant)
            stored = self._stored(oldest)
            self._texts.popleft()
            self._count(oldest, -1)
            self.num_removed += not stays
            if stays:
                self._may_stay -= oldest.num_places
                self._put(stored)
                self._entered_again(stored)
        else:
            self._may_stay = min(self._may_stay + MAX_STAYING * num_places, self.capacity // 4)
            self._waiting.popleft()
            self._waiting_bytes -= entering.tokens.nbytes + TENANT_BYTES
            self._put(entering)

    def _stays(self, text: _Text, entering: bytes) -> bool:
        """Returns whether a text has a second chance when the entering tenant needs room."""
        if self.ring.used[self._places(text)].any():
            return True
        if text.tenant == entering or self._has_too_much(text.tenant):
            return False
        are_few = self._places_of_strangers * STRANGERS_SHARE < self.capacity
        return self.is_back(text.tenant) or are_few or self._has_too_much(entering)

    def _has_too_much(self, tenant: bytes) -> bool:
        """Returns whether a tenant has more than half of its share of the room."""
        entry = self._tenants.get(tenant)
        if entry is None:
            return False
        return 2 * entry.num_places * (self._num_back if entry.is_back else len(self._tenants)) > self.capacity

    def _put(self, text: StoredText) -> None:
        begin, num_places = int(self.ring.state[HEAD]) + 1, _num_places(text.tokens)
        new = _Text(text.tenant, begin, len(text.tokens), num_places)
        self._count(new, 1)
        if text.in_use:
            self.ask(text.tenant)
        places = np.arange(begin - 1, begin - 1 + num_places) % self.capacity
        self.ring.tokens[places], self.ring.owners[places] = NONE, self.number(text.tenant)
        self.ring.tokens[self._places(new)] = text.tokens
        self.ring.used[places] = False
        self.ring.state[HEAD] += num_places
        self._texts.append(new)
        self._linking = text.tokens, 0

    def _count(self, text: _Text, sign: int) -> None:
        """Adds a text to the counts (sign 1), or subtracts it (sign -1)."""
        entry = self._tenants.get(text.tenant)
        if entry is None:
            self._last_number = self._last_number % MAX_NUMBERS + 1
            while self._last_number in self._numbers:
                self._last_number = self._last_number % MAX_NUMBERS + 1
            self._numbers.add(self._last_number)
            entry = self._tenants[text.tenant] = _Tenant(self._last_number)
        entry.num_places += sign * text.num_places
        self.num_tokens += sign * text.num_tokens
        if not entry.is_back:
            self._places_of_strangers += sign * text.num_places
        if entry.num_places == 0:
            self._num_back -= entry.is_back
            self._numbers.discard(entry.number)
            del self._tenants[text.tenant]

    def _places(self, text: _Text) -> Int32Array:
        return np.arange(text.begin, text.begin + text.num_tokens) % self.capacity

    def _stored(self, text: _Text) -> StoredText:
        return StoredText(self.is_back(text.tenant), text.tenant, self.ring.tokens[self._places(text)])


def _num_places(tokens: Int32Array) -> int:
    return max(len(tokens) + 1, MIN_PLACES)
