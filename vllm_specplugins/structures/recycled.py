"""Recycled tokens: of each tenant, behind each token of the vocabulary, the likeliest next one that was seen last.

Tables are rows of two arrays that are as large as they may be from the start; memory comes as it is written to. V:
vocab_size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from vllm_specplugins.structures.compiled import compiled

BYTES_PER_TOKEN = 5
NO_TABLE = -1

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
_ids, _ints = types.int32[::1], types.int64[::1]
_given = types.Array(types.int32, 1, "C", readonly=True)
_tables = types.int32[:, ::1], types.uint8[:, ::1]


@compiled(types.void(_ints, _given, _given, *_tables))
def _learn(tables: Int64Array, token_ids: Int32Array, next_ids: Int32Array, likeliest: Any, times: Any) -> None:
    """See RecycledTokens.learn."""
    vocab_size = likeliest.shape[1]
    for place in range(len(tables)):
        table, token, following = tables[place], token_ids[place], next_ids[place]
        if table < 0 or not (0 <= token < vocab_size and 0 <= following < vocab_size):
            continue
        if likeliest[table, token] != following:
            likeliest[table, token], times[table, token] = following, 0
        times[table, token] = min(times[table, token] + 1, 255)


@compiled(types.void(_ints, _ids, _ints, *_tables, types.int32[:, ::1], _ints, types.float64[::1]))
def _follow(
    tables: Int64Array,
    newest: Int32Array,
    wanted: Int64Array,
    likeliest: Any,
    times: Any,
    token_ids: Any,
    num_draft: Int64Array,
    first_times: Any,
) -> None:
    """See RecycledTokens.follow; into the last three, which are 0."""
    vocab_size = likeliest.shape[1]
    for row in range(len(tables)):
        table, token = tables[row], newest[row]
        if table < 0 or not 0 <= token < vocab_size:
            continue
        first_times[row] = times[table, token]
        for place in range(min(wanted[row], token_ids.shape[1])):
            if times[table, token] == 0:
                break
            token = likeliest[table, token]
            token_ids[row, place] = token
            num_draft[row] += 1


class RecycledTokens:
    """Tables of the tenants that asked last.

    Args:
        max_bytes: of all tables together.
        vocab_size: V.

    Raises:
        ValueError: there is no room for one table.
    """

    def __init__(self, max_bytes: int, vocab_size: int):
        self._num_tables, self._vocab_size = max_bytes // (BYTES_PER_TOKEN * vocab_size), vocab_size
        if self._num_tables == 0:
            raise ValueError(
                f"max_table_bytes must be at least {BYTES_PER_TOKEN * vocab_size}, one table of {vocab_size} tokens, "
                f"not {max_bytes}."
            )
        self.clear()

    def clear(self) -> None:
        """Forgets all tables."""
        shape = self._num_tables, self._vocab_size
        self._likeliest, self._times = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        self._tables: dict[bytes, int] = {}  # who asked longest ago first

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return self._likeliest.nbytes + self._times.nbytes

    @property
    def num_tenants(self) -> int:
        """Who have a table."""
        return len(self._tables)

    def of(self, tenants: Sequence[bytes]) -> Int64Array:
        """Each one's table, and if need be a new one; NO_TABLE where all are those of others among them.

        At most one table is taken from somebody at a time: to clear it takes 0.1 ms, where V is 128 k.
        """
        wanted = dict.fromkeys(tenants)
        for tenant in wanted:
            if tenant in self._tables:
                self._tables[tenant] = self._tables.pop(tenant)
        for tenant in wanted:
            if tenant in self._tables:
                continue
            if len(self._tables) < self._num_tables:
                self._tables[tenant] = len(self._tables)
            elif (oldest := next(iter(self._tables))) not in wanted:
                self._tables[tenant] = table = self._tables.pop(oldest)
                self._likeliest[table], self._times[table] = 0, 0
                break
        return np.array([self._tables.get(tenant, NO_TABLE) for tenant in tenants], np.int64)

    def learn(self, tables: Int64Array, token_ids: Int32Array, next_ids: Int32Array) -> None:
        """Takes in, in order, the likeliest token behind each of these.

        Args:
            tables: [N], where to; NO_TABLE: nowhere.
            token_ids, next_ids: [N] int32; pairs in which one is no token are left out.
        """
        _learn(tables, token_ids, next_ids, self._likeliest, self._times)

    def follow(
        self, tables: Int64Array, newest: Int32Array, wanted: Int64Array, width: int
    ) -> tuple[Int32Array, Int64Array, npt.NDArray[np.float64]]:
        """The likeliest tokens behind the newest, one behind the other, as far as they are known.

        Args:
            tables: [R], of each request.
            newest: [R] int32.
            wanted: [R], most tokens of each, up to `width`.

        Returns tokens [R, width], their numbers [R], and how often in a row the first was the likeliest [R], up to 255.
        """
        num_reqs = len(tables)
        found = np.zeros((num_reqs, width), np.int32), np.zeros(num_reqs, np.int64), np.zeros(num_reqs)
        _follow(tables, newest, wanted, self._likeliest, self._times, *found)
        return found
