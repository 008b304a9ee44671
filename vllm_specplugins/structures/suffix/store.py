"""A bounded store of finished texts by tenant.

Oliaro et al. 2024 (suffix decoding). Knows nothing of batches or engines. Texts are entered, and those that were used
longest ago removed, by pieces: `work` does as much as it is told to. A text that is being entered, or removed, is a
shorter one.

One tenant's texts are never looked at for another: what is hashed begins with the tenant, and tokens are compared in
its own pages alone. Tenants share the room: who holds more than its share makes room for itself. A text is proven when
it is drafted from, or comes from a tenant that has asked again while it had one; what is not makes room first, unless
tenants that never asked again have little.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from vllm_specplugins.structures.suffix.pages import (
    FIRST,
    KIND,
    NONE,
    OLDER,
    OLDEST,
    OWNER,
    PAGE,
    PROVEN,
    UNORDERED,
    UNPROVEN,
    USED,
    Int32Array,
    Int64Array,
)
from vllm_specplugins.structures.suffix.recency import oldest_of, order
from vllm_specplugins.structures.suffix.texts import SMALLEST_BYTES, Texts

WAITING_SHARE = 16  # one part in so many is for texts that wait to be entered
TENANT_BYTES = 400  # of what is kept of a tenant
STRANGERS_SHARE = 16  # one part in so many is for tenants that have not asked again
FURTHEST = 1000  # texts that are looked at for a tenant's oldest one
WHOLE = 1 << 62


@dataclass(slots=True)
class _Tenant:
    number: int
    num_pages: int = 0
    is_back: bool = False  # it has asked again while it had a text


@dataclass(slots=True)
class _Entering:
    """A text of which `start` tokens are entered."""

    tenant: bytes
    text: Int32Array
    is_proven: bool
    start: int = 0
    first: int = NONE


class SuffixStore:
    """See the module. ValueError if max_bytes is less than 2 * SMALLEST_BYTES.

    >>> store = SuffixStore(1 << 20)
    >>> store.enter(b"me", np.array([1, 2, 3, 4, 5], np.int32))
    True
    """

    def __init__(self, max_bytes: int):
        if max_bytes < 2 * SMALLEST_BYTES:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least {2 * SMALLEST_BYTES}.")
        self._max_waiting_bytes = max_bytes // WAITING_SHARE
        self.texts = Texts(max_bytes - self._max_waiting_bytes)
        self._longest = self.texts.num_pages * PAGE // WAITING_SHARE
        self.clear()

    def clear(self) -> None:
        """Forgets all texts."""
        self.texts.clear()
        self._tenants: dict[bytes, _Tenant] = {}
        self._names: dict[int, bytes] = {}  # of tenants, by number
        self._num_tenants_ever = self._num_back = self._pages_of_strangers = 0
        self._waiting: deque[_Entering] = deque()
        self._waiting_bytes = 0
        self._entering: _Entering | None = None
        self._leaving = NONE  # first page of the text that is being removed
        self.num_texts = self.num_removed = self.num_refused = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays and of what waits."""
        return self.texts.num_bytes + self._waiting_bytes

    @property
    def num_tenants(self) -> int:
        """That have a text."""
        return len(self._tenants)

    def number(self, tenant: bytes) -> int:
        """By which the texts know a tenant; 0 if there is nothing of it."""
        known = self._tenants.get(tenant)
        return 0 if known is None else known.number

    def ask(self, tenant: bytes) -> int:
        """Notes that a request of the tenant's begins; its number."""
        known = self._tenants.get(tenant)
        if known is not None:
            self._come_back(known)
        return self.number(tenant)

    def is_back(self, tenant: bytes) -> bool:
        """Whether a tenant has asked again while it had a text."""
        return tenant in self._tenants and self._tenants[tenant].is_back

    # text: [num_tokens] int32, ids >= 0
    def enter(self, tenant: bytes, text: Int32Array, is_proven: bool = False) -> bool:
        """Has a text entered by the next `work`; False where too many wait. Of one that is too long the end is kept."""
        text = np.array(text[-self._longest :], np.int32)
        num_bytes = text.nbytes + TENANT_BYTES
        if len(text) < 2 or self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            self.num_refused += 1
            return False
        self._waiting.append(_Entering(tenant, text, is_proven))
        self._waiting_bytes += num_bytes
        return True

    @property
    def has_work(self) -> bool:
        """Whether texts wait to be entered, or are being entered or removed."""
        return bool(self._waiting) or self._entering is not None or self._leaving != NONE

    def work(self, most: int = WHOLE) -> int:
        """Enters and removes texts as far as so much work goes, in looks into a table; what is left of it."""
        while most > 0:
            if self._leaving != NONE:
                most = self._go_on_removing(most)
            elif self._entering is not None:
                most = self._go_on_entering(self._entering, most)
            elif self._waiting:
                if _num_pages(self._waiting[0].text) > self.texts.num_free:
                    self._begin_to_remove(self._victim(self._waiting[0].tenant))
                else:
                    self._begin_to_enter(self._waiting.popleft())
                most -= 1
            else:
                break
        return most

    def contents_of(self, start: int, end: int) -> list[tuple[tuple[int, int], bytes, Int32Array]]:
        """Of each text that begins in these pages: whether it is proven, and when it was used last, its tenant and its
        tokens."""
        pages = self.texts.pages[start:end]
        begins = (pages[:, FIRST] == np.arange(start, start + len(pages))) & (pages[:, OLDER] != UNORDERED)
        firsts = (start + np.flatnonzero(begins)).tolist()
        rows = self.texts.pages[firsts][:, [KIND, USED, OWNER]].tolist()
        return [
            ((kind, used), self._names[owner], self.texts.read(first))
            for first, (kind, used, owner) in zip(firsts, rows, strict=True)
        ]

    def _come_back(self, tenant: _Tenant) -> None:
        if not tenant.is_back:
            tenant.is_back = True
            self._num_back += 1
            self._pages_of_strangers -= tenant.num_pages

    def _add_pages(self, tenant: _Tenant, count: int) -> None:
        tenant.num_pages += count
        if not tenant.is_back:
            self._pages_of_strangers += count

    def _victim(self, tenant: bytes) -> int:
        """The text to be removed for one of this tenant's: its own where it holds more than its share."""
        known = self._tenants.get(tenant)
        if known is not None:
            num_sharing = self._num_back if known.is_back else len(self._tenants)
            if known.num_pages * num_sharing > self.texts.num_pages:
                own = [oldest_of(known.number, kind, FURTHEST, *self._ordered) for kind in (UNPROVEN, PROVEN)]
                if own != [NONE, NONE]:
                    return next(first for first in own if first != NONE)
        unproven, proven = self.texts.state[OLDEST : OLDEST + 2].tolist()
        return int(proven if unproven == NONE or (proven != NONE and self._is_spared(unproven)) else unproven)

    def _is_spared(self, first: int) -> bool:
        """Whether a text is of a tenant that has not asked again, and these have little."""
        tenant = self._tenants[self._names[int(self.texts.pages[first, OWNER])]]
        return not tenant.is_back and self._pages_of_strangers * STRANGERS_SHARE < self.texts.num_pages

    @property
    def _ordered(self) -> tuple[Int32Array, Int64Array]:
        return self.texts.pages, self.texts.state

    def _begin_to_enter(self, entering: _Entering) -> None:
        known = self._tenants.get(entering.tenant)
        if known is None:
            self._num_tenants_ever += 1
            known = self._tenants[entering.tenant] = _Tenant(self._num_tenants_ever)
            self._names[known.number] = entering.tenant
        if entering.is_proven:
            self._come_back(known)
        self._add_pages(known, _num_pages(entering.text))
        self._entering = entering

    def _go_on_entering(self, entering: _Entering, most: int) -> int:
        known = self._tenants[entering.tenant]
        entering.start, entering.first, most = self.texts.enter(
            entering.text, entering.start, entering.first, known.number, most
        )
        if entering.start == len(entering.text):
            order(entering.first, PROVEN if known.is_back else UNPROVEN, *self._ordered)
            self._waiting_bytes -= entering.text.nbytes + TENANT_BYTES
            self._entering = None
            self.num_texts += 1
        return most

    def _begin_to_remove(self, first: int) -> None:
        order(first, NONE, *self._ordered)
        self._leaving = first
        self.num_texts -= 1
        self.num_removed += 1

    def _go_on_removing(self, most: int) -> int:
        name = self._names[int(self.texts.pages[self._leaving, OWNER])]
        num_free = self.texts.num_free
        self._leaving, most = self.texts.remove(self._leaving, most)
        known = self._tenants[name]
        self._add_pages(known, num_free - self.texts.num_free)
        if known.num_pages == 0:
            self._num_back -= known.is_back
            del self._tenants[name], self._names[known.number]
        return most


def _num_pages(text: Int32Array) -> int:
    return -(-len(text) // PAGE)
