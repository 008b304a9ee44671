"""What structures that index texts may do and hold together: their work in a step, and the memory of their tables.

A large table is memory of its own: its pages come when they are first written, which whoever made it does by
pieces, and go back by pieces. Allocators would give it huge pages: the first write to one takes milliseconds.
"""

import mmap
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

OWN_MEMORY_FROM = 1 << 16  # bytes of a table
ASKING = 128  # the work of asking the system for memory
GIVING_BACK = 1 << 16  # the last of a table takes its address range along: as long as freeing so many bytes


@dataclass(slots=True)
class Allowance:
    """What indexes may do and hold together. Tables that are dropped count until they are freed.

    Args:
        work: what is left of it, in looks into a table, until somebody grants more; below 0 by a few at most.
        max_bytes: of their tables.
        num_bytes: what they hold of these.
        num_dropped_bytes: how much of it nobody uses any more.

    >>> allowance = Allowance(max_bytes=1 << 20)
    >>> table = allowance.make_table(1 << 16)
    >>> allowance.drop_table(table)
    >>> allowance.free(300_000)
    >>> allowance.num_bytes, allowance.num_dropped_bytes
    (225280, 225280)
    """

    work: int = 1 << 62
    max_bytes: int = 1 << 62
    num_bytes: int = 0
    num_dropped_bytes: int = 0
    _dropped: deque[Int64Array] = field(default_factory=deque)
    _num_freed: int = 0  # bytes of the first of them

    def make_table(self, num_slots: int) -> Int64Array | None:
        """A table [num_slots] int64, not cleared, or None if there will be room once what was dropped is freed.

        MemoryError if there will be none.
        """
        num_bytes = 8 * num_slots
        if self.num_bytes - self.num_dropped_bytes + num_bytes > self.max_bytes:
            raise MemoryError(f"{num_bytes} bytes more than {self.num_bytes} are not allowed.")
        if self.num_bytes + num_bytes > self.max_bytes:
            return None
        table = np.empty(num_slots, np.int64) if num_bytes < OWN_MEMORY_FROM else _own_memory(num_slots)
        self.num_bytes += num_bytes
        return table

    # table: int64, made by make_table
    def drop_table(self, table: Int64Array) -> None:
        """Gives a table up, which must not be used any more; a large one is freed later, by pieces."""
        if isinstance(table.base, mmap.mmap):
            self._dropped.append(table)
            self.num_dropped_bytes += table.nbytes
        else:
            self.num_bytes -= table.nbytes

    def free(self, num_bytes: int) -> None:
        """Frees up to so many bytes of dropped tables, to be called in every step; fewer, where tables end."""
        while self._dropped and num_bytes >= mmap.PAGESIZE:
            table = self._dropped[0]
            size = min(num_bytes // mmap.PAGESIZE * mmap.PAGESIZE, table.nbytes - self._num_freed)
            table.base.madvise(mmap.MADV_DONTNEED, self._num_freed, size)  # type: ignore[union-attr]
            self._num_freed += size
            self.num_bytes -= size
            self.num_dropped_bytes -= size
            num_bytes -= size
            if self._num_freed == table.nbytes:
                self._dropped.popleft()
                self._num_freed = 0
                num_bytes -= GIVING_BACK


def work_of_making(num_slots: int) -> int:
    """The work of a table, without clearing it; more than 0."""
    return 1 if 8 * num_slots < OWN_MEMORY_FROM else ASKING


def _own_memory(num_slots: int) -> Int64Array:
    """A table whose base is an anonymous mapping."""
    memory = mmap.mmap(-1, 8 * num_slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.ndarray(num_slots, np.int64, buffer=memory)
