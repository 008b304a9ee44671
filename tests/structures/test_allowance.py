"""Memory of tables: counted, bounded, given back by pieces; each docstring names mutations that its test kills."""

import doctest
import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from vllm_specplugins.structures import allowance as module
from vllm_specplugins.structures.allowance import GIVING_BACK, OWN_MEMORY_FROM, Allowance, work_of_making

SLOTS = OWN_MEMORY_FROM // 8  # of the smallest table that has memory of its own


def test_freeing_is_bounded() -> None:
    """A call frees no more than it may, what it frees is gone, and the rest still counts.

    Kills: freeing a table as a whole, bytes that are counted as free and held, or free and counted.
    """
    allowance = Allowance()
    tables = [allowance.make_table(size) for size in (4 * SLOTS, 8 * SLOTS, SLOTS)]
    for table in tables:
        table[:] = 7
        allowance.drop_table(table)
    total = 13 * OWN_MEMORY_FROM
    assert allowance.num_bytes == allowance.num_dropped_bytes == total
    num_calls = 0
    while allowance.num_bytes:
        before = allowance.num_bytes
        allowance.free(3 * mmap.PAGESIZE + 1)
        num_calls += 1
        assert 0 < before - allowance.num_bytes <= 3 * mmap.PAGESIZE
        assert allowance.num_bytes == allowance.num_dropped_bytes == 8 * sum(np.count_nonzero(t) for t in tables)
    assert num_calls >= total / (3 * mmap.PAGESIZE)


def test_many_tables_at_once() -> None:
    """Giving back address ranges takes its time, too. Kills: a bound that counts bytes alone."""
    allowance = Allowance()
    for _ in range(20):
        allowance.drop_table(allowance.make_table(SLOTS))
    allowance.free(10 * OWN_MEMORY_FROM)
    assert 20 * OWN_MEMORY_FROM - allowance.num_bytes <= 10 * OWN_MEMORY_FROM**2 // (OWN_MEMORY_FROM + GIVING_BACK)


def test_room_comes_back() -> None:
    """Kills: a small table that waits to be freed; one that fails where it had to wait; a bound that does not count
    what is dropped."""
    allowance = Allowance(max_bytes=2 * OWN_MEMORY_FROM)
    small = allowance.make_table(SLOTS // 2)
    allowance.drop_table(small)
    assert allowance.num_bytes == 0
    large = allowance.make_table(2 * SLOTS)
    with pytest.raises(MemoryError, match=f"{OWN_MEMORY_FROM} bytes more than {2 * OWN_MEMORY_FROM} are not allowed"):
        allowance.make_table(SLOTS)
    allowance.drop_table(large)
    assert allowance.make_table(SLOTS) is None
    allowance.free(OWN_MEMORY_FROM)
    assert allowance.make_table(SLOTS) is not None
    assert allowance.num_bytes == 2 * OWN_MEMORY_FROM


def test_no_huge_pages() -> None:
    """Kills: a large table from NumPy's allocator, which asks for them: one takes milliseconds when first written."""
    maps = Path("/proc/self/smaps")
    if not maps.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("huge pages cannot be looked at here")
    table = Allowance().make_table(1 << 20)
    flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) (?:.|\n)*?VmFlags:(.*)", maps.read_text(), re.M)
    own = [line for low, high, line in flags if int(low, 16) <= table.ctypes.data < int(high, 16)]
    assert len(own) == 1 and "nh" in own[0].split()


def test_work_of_making() -> None:
    """Kills: asking the system for memory as if it were for nothing."""
    assert work_of_making(SLOTS - 1) == 1 < work_of_making(SLOTS)


def test_example_in_docstring() -> None:
    """Kills: an example that no longer runs."""
    result = doctest.testmod(module)
    assert result.attempted >= 4 and result.failed == 0
