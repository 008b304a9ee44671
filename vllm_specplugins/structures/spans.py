"""Manages the free spans of a fixed block of memory."""

from bisect import insort


class SpanAllocator:
    """Allocates spans of `size` places, all of which are free at first. It chooses the first free span that is large
    enough.

    >>> spans = SpanAllocator(10)
    >>> spans.take(4), spans.take(4), spans.take(4)
    (0, 4, None)
    >>> spans.give_back(0, 4); spans.take(3)
    0
    """

    def __init__(self, size: int):
        self._free = [(0, size)]  # (start, end), in order, none adjacent to another

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, size: int) -> int | None:
        """Allocates a free span of this size and returns its start, or None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        insort(self._free, (start, start + size))
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        self._free = joined
