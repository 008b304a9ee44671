"""Pieces of a memory, one behind the other, that are taken and given back."""

from bisect import insort


class Extents:
    """Of `size` units. The first piece that is large enough is taken.

    >>> extents = Extents(10)
    >>> extents.take(4), extents.take(4), extents.take(4)
    (0, 4, None)
    >>> extents.give(0, 4)
    >>> extents.take(3)
    0
    """

    def __init__(self, size: int):
        self._free = [(0, size)]  # starts and ends of what is free, in order, with something between them

    def take(self, size: int) -> int | None:
        """Where a piece of so many units begins; None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                return start
        return None

    def give(self, start: int, end: int) -> None:
        """Gives a piece back."""
        if start == end:
            return
        insort(self._free, (start, end))
        index = self._free.index((start, end))
        around = self._free[max(0, index - 1) : index + 2]
        joined: list[tuple[int, int]] = []
        for piece in around:
            if joined and joined[-1][1] == piece[0]:
                joined[-1] = (joined[-1][0], piece[1])
            else:
                joined.append(piece)
        self._free[max(0, index - 1) : index + 2] = joined
