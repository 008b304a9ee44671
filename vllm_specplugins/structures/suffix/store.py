"""A bounded store of finished texts by tenant.

Oliaro et al. 2024 (suffix decoding). Knows nothing of batches or engines. Texts lie in a ring, the oldest makes room
first. It stays, as the newest, if it was drafted from since it was entered, or if its tenant has less than half its
share and is not the one that enters; of tenants that never asked again, only while these have little, or make room for
one that has more. What stays is entered again, so that is bounded, too. One tenant's texts are never looked at for
another. All of it is done by pieces: `work` does as much as it is told to.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_specplugins.structures.suffix.ring import HEAD, NONE, Int32Array, clear, link, new_ring
from vllm_specplugins.structures.suffix.store_file import StoredText

SMALLEST_BYTES = 1 << 17
WAITING_SHARE = 16  # one part in so many is for texts that wait to be entered
TENANT_BYTES = 400  # of what is kept of a tenant
STRANGERS_SHARE = 16  # one part in so many is for tenants that have not asked again
MOST_STAYING = 4  # tokens of texts that stay for each one that is entered
LEAST_PLACES = 16  # that a text takes up, for what is kept of it beside
MOST_NUMBERS = (1 << 31) - 1
WHOLE = 1 << 62


@dataclass(slots=True)
class _Tenant:
    number: int
    num_places: int = 0
    is_back: bool = False  # it has asked again while it had a text


class _Text(NamedTuple):
    tenant: bytes
    begin: int  # the place of its first token; before that stands one of no text
    num_tokens: int
    num_places: int


class SuffixStore:
    """See the module; who is given `entered_again` hears of texts that stay. ValueError if max_bytes is too small.

    >>> store = SuffixStore(1 << 20)
    >>> store.enter(b"me", np.array([1, 2, 3, 4, 5], np.int32))
    True
    """

    def __init__(self, max_bytes: int, entered_again: Callable[[StoredText], None] = lambda text: None):
        if max_bytes < SMALLEST_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least {SMALLEST_BYTES}.")
        self._max_waiting_bytes, self._entered_again = max_bytes // WAITING_SHARE, entered_again
        self.ring = new_ring(max_bytes - self._max_waiting_bytes)
        self.max_tokens = len(self.ring.tokens)
        self._longest = self.max_tokens // WAITING_SHARE
        self.clear()

    def clear(self) -> None:
        """Forgets all texts."""
        clear(self.ring)
        self._texts: deque[_Text] = deque()  # in the ring's order
        self._tenants: dict[bytes, _Tenant] = {}
        self._waiting: deque[StoredText] = deque()
        self._linking: tuple[Int32Array, int] | None = None  # the newest text, and how much of it is linked
        self._num_tenants_ever = self._num_back = self._places_of_strangers = self._may_stay = 0
        self._waiting_bytes = self.num_tokens = self.num_removed = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays and of what waits."""
        return sum(array.nbytes for array in self.ring) + self._waiting_bytes

    @property
    def num_tenants(self) -> int:
        """That have a text."""
        return len(self._tenants)

    @property
    def num_texts(self) -> int:
        """That are entered."""
        return len(self._texts)

    def number(self, tenant: bytes) -> int:
        """By which the ring knows a tenant; 0 if there is nothing of it."""
        known = self._tenants.get(tenant)
        return 0 if known is None else known.number

    def ask(self, tenant: bytes) -> None:
        """Notes that a request of the tenant's begins."""
        known = self._tenants.get(tenant)
        if known is not None and not known.is_back:
            known.is_back = True
            self._num_back += 1
            self._places_of_strangers -= known.num_places

    def is_back(self, tenant: bytes) -> bool:
        """Whether a tenant has asked again while it had a text."""
        return tenant in self._tenants and self._tenants[tenant].is_back

    # text: [num_tokens] int32, ids >= 0
    def enter(self, tenant: bytes, text: Int32Array, in_use: bool = False) -> bool:
        """Has a text entered by the next `work`; False where too many wait. Of one that is too long the end is kept."""
        text = np.array(text[-self._longest :], np.int32)
        num_bytes = text.nbytes + TENANT_BYTES
        if len(text) < 2 or self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            self.num_refused += 1
            return False
        self._waiting.append(StoredText(in_use, tenant, text))
        self._waiting_bytes += num_bytes
        return True

    @property
    def has_work(self) -> bool:
        """Whether texts wait to be entered, or are being entered."""
        return bool(self._waiting) or self._linking is not None

    def work(self, most: int = WHOLE) -> int:
        """Enters texts as far as so much work goes, in looks into a table; what is left of it."""
        while most > 0 and self.has_work:
            if self._linking is not None:
                text, (tokens, start) = self._texts[-1], self._linking
                start, most = link(tokens, start, text.begin, self.number(text.tenant), most, tuple(self.ring))
                self._linking = (tokens, start) if start < len(tokens) - 1 else None
            else:
                most -= 1
                self._make_room_or_put(self._waiting[0])
        return most

    def texts(self) -> list[StoredText]:
        """All that are entered, in the ring's order."""
        return [StoredText(self.is_back(text.tenant), text.tenant, self._read(text)) for text in self._texts]

    def _make_room_or_put(self, entering: StoredText) -> None:
        num_places = _num_places(entering.tokens)
        if self._texts and int(self.ring.state[HEAD]) + num_places - self._texts[0].begin >= self.max_tokens:
            oldest = self._texts[0]
            stays = oldest.num_places <= self._may_stay and self._stays(oldest, entering.tenant)
            kept = StoredText(self.is_back(oldest.tenant), oldest.tenant, self._read(oldest))
            self._texts.popleft()
            self._count(oldest, -1)
            self.num_removed += not stays
            if stays:
                self._may_stay -= oldest.num_places
                self._put(kept)
                self._entered_again(kept)
        else:
            self._may_stay = min(self._may_stay + MOST_STAYING * num_places, self.max_tokens // 4)
            self._waiting.popleft()
            self._waiting_bytes -= entering.tokens.nbytes + TENANT_BYTES
            self._put(entering)

    def _stays(self, text: _Text, entering: bytes) -> bool:
        """Whether a text is entered again, where one of the entering tenant's needs room."""
        if self.ring.used[self._places(text)].any():
            return True
        if text.tenant == entering or self._has_too_much(text.tenant):
            return False
        are_few = self._places_of_strangers * STRANGERS_SHARE < self.max_tokens
        return self.is_back(text.tenant) or are_few or self._has_too_much(entering)

    def _has_too_much(self, tenant: bytes) -> bool:
        known = self._tenants.get(tenant)
        if known is None:
            return False
        return 2 * known.num_places * (self._num_back if known.is_back else len(self._tenants)) > self.max_tokens

    def _put(self, text: StoredText) -> None:
        begin, num_places = int(self.ring.state[HEAD]) + 1, _num_places(text.tokens)
        new = _Text(text.tenant, begin, len(text.tokens), num_places)
        self._count(new, 1)
        if text.in_use:
            self.ask(text.tenant)
        every = np.arange(begin - 1, begin - 1 + num_places) % self.max_tokens
        self.ring.tokens[every], self.ring.owners[every] = NONE, self.number(text.tenant)
        self.ring.tokens[self._places(new)] = text.tokens
        self.ring.used[every] = False
        self.ring.state[HEAD] += num_places
        self._texts.append(new)
        self._linking = text.tokens, 0

    def _count(self, text: _Text, sign: int) -> None:
        """Counts a text as one that is there, or as one that is not any more."""
        known = self._tenants.get(text.tenant)
        if known is None:
            self._num_tenants_ever += 1
            known = self._tenants[text.tenant] = _Tenant(1 + self._num_tenants_ever % MOST_NUMBERS)
        known.num_places += sign * text.num_places
        self.num_tokens += sign * text.num_tokens
        if not known.is_back:
            self._places_of_strangers += sign * text.num_places
        if known.num_places == 0:
            self._num_back -= known.is_back
            del self._tenants[text.tenant]

    def _places(self, text: _Text) -> Int32Array:
        return np.arange(text.begin, text.begin + text.num_tokens) % self.max_tokens

    def _read(self, text: _Text) -> Int32Array:
        return self.ring.tokens[self._places(text)]


def _num_places(tokens: Int32Array) -> int:
    return max(len(tokens) + 1, LEAST_PLACES)
